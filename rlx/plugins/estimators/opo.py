"""A_i = R_i − Σ(l·R)/Σl over the group: OPO, arXiv:2505.23585."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(requires={"groups"})
def opo(x: EstimatorInputs) -> Tensor:
    """Rewards against the group's length-weighted mean, which is the optimal baseline.

    Formula: R − Σ(l·R)/Σl over the group, l the rollout's number of action tokens.
    Source: On-Policy RL with Optimal Reward Baseline, arXiv:2505.23585.
    Use: exactly on policy; least variance when gradient norms grow with length.

    Returns:
        [B].
    """
    mean = x.group_mean(x.rewards)
    # Weighting distances from the mean keeps a constant group exactly 0.
    above = x.rewards - mean
    tokens = x.group_sum(x.lengths)
    shift = x.group_sum(x.lengths * above) / tokens.clamp(min=1)
    return above - torch.where(tokens > 0, shift, torch.zeros_like(shift))
