"""Geometric mean over the rollout of ratios clipped in log space: GMPO, arXiv:2507.20673."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(aggregation="seq-mean-token-mean")
def gmpo(x: LossInputs, *, clip_low: NonNegative = 0.4, clip_high: NonNegative = 0.4) -> Tensor:
    """Surrogate of the geometric-mean ratio, which outlier tokens hardly move.

    Formula: −A·exp(mean_t c_t) with c_t = min(log ρ, clip_high) where A ≥ 0 and
    c_t = max(log ρ, −clip_low) where A < 0.
    Source: GMPO, arXiv:2507.20673; aggregation `seq-mean-token-mean`.
    Use: stabler than token ratios with a wider band than PPO's.

    Args:
        clip_low: bound below on log ρ of tokens with a negative advantage.
        clip_high: bound above on log ρ of the others.

    Returns:
        [N].
    """
    log_ratio = x.log_ratio
    clipped = torch.where(
        x.advantages >= 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low)
    )
    return -x.advantages * x.to_tokens(x.sequence_mean(clipped).exp())
