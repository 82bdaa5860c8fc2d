"""Which tokens drive entropy down: the covariance of log-prob and advantage, arXiv:2505.22617."""

from __future__ import annotations

import torch

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor


def highest_covariance(x: LossInputs, *, fraction: float, low: float, high: float) -> Tensor:
    """Mask [N] of the `fraction` of the step's tokens with the highest covariance.

    At least one token, where the fraction is not 0.

    cov_t = (log π_old − mean)·(A − mean), strictly between low and high; means and ranks are over
    the whole optimizer step, so the choice does not depend on micro-batches. π_old stands in for
    the paper's π, which is the same at the first update and not yet known for later micro-batches.
    """
    known = x.step_old_logprobs.isfinite()
    logprobs, advantages = x.step_old_logprobs[known], x.step_advantages[known]
    centre = x.batch_mean(logprobs), x.batch_mean(advantages)
    step = (logprobs - centre[0]) * (advantages - centre[1])
    candidates = step[(step > low) & (step < high)]
    if not candidates.numel() or fraction == 0:
        return torch.zeros_like(x.advantages, dtype=torch.bool)
    count = min(max(1, int(fraction * x.step_advantages.numel())), candidates.numel())
    threshold = candidates.topk(count).values[-1]
    own = (x.old_logprobs - centre[0]) * (x.advantages - centre[1])
    return (own >= threshold) & (own > low) & (own < high)
