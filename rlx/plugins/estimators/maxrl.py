"""A_i = (R_i − mean_g) / mean_g: MaxRL, arXiv:2602.02710."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(requires={"groups"})
def maxrl(x: EstimatorInputs) -> Tensor:
    """Group-centred rewards divided by the group's mean, which weights hard tasks up.

    Formula: (R − mean_g) / mean_g where mean_g > 0, else 0.
    Source: Maximum Likelihood Reinforcement Learning, arXiv:2602.02710.
    Use: rewards in [0, 1]; approaches the gradient of log(pass rate) as groups grow.

    Returns:
        [B].
    """
    mean = x.group_mean(x.rewards)
    solved = mean > 0
    advantages = (x.rewards - mean) / mean.where(solved, torch.ones_like(mean))
    return torch.where(solved, advantages, torch.zeros_like(advantages))
