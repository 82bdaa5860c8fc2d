"""PPO's clip on the sequence ratio s = exp(mean_t log ρ_t): GSPO, arXiv:2507.18071."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import LossInputs, bounded
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(aggregation="seq-mean-token-mean")
def gspo(x: LossInputs, *, clip_low: NonNegative = 3e-4, clip_high: NonNegative = 4e-4) -> Tensor:
    """Clipped surrogate with one length-normalised ratio per rollout.

    Formula: s = exp(clamp(mean_t(log π − log π_old), ±20)); s_t = sg(s)·π_t/sg(π_t);
    −min(s_t·A, clip(s_t, 1 − clip_low, 1 + clip_high)·A).
    Source: GSPO (the token form), arXiv:2507.18071; aggregation `seq-mean-token-mean`.
    Use: mixture-of-experts models and long responses, where token ratios are noise.

    Args:
        clip_low: how far the sequence ratio may fall below 1; note the small scale.
        clip_high: how far it may rise above 1.

    Returns:
        [N].
    """
    log_ratio = bounded(x.sequence_mean(x.logprobs - x.old_logprobs)).detach()
    # Value: the sequence's ratio; gradient: that ratio times the token's own score.
    # The difference first: it is exactly 0, where a sum with a log-prob would round the ratio.
    ratio = (x.to_tokens(log_ratio) + (x.logprobs - x.logprobs.detach())).exp()
    A = x.advantages
    return -torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
