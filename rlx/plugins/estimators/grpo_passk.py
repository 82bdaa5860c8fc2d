"""Only the group's best rollout learns, by its lead: arXiv:2503.19595."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(requires={"groups"})
def grpo_passk(x: EstimatorInputs, *, scale: bool = False, eps: NonNegative = 1e-6) -> Tensor:
    """The group's best rollout gets its lead over the second, all others 0.

    Formula: R_best − R_second for the best rollout of the group, else 0; with `scale` divided by
    std_g + eps. A tie for the best has no lead, so it gives 0.
    Source: arXiv:2503.19595 (optimising pass@k).
    Use: when the best of k samples is what counts.

    Args:
        scale: divide by the group's standard deviation.
        eps: added to it.

    Returns:
        [B].
    """
    R = x.rewards
    best = x.group_max(R)
    leads = best == R
    alone = x.group_sum(leads.to(R.dtype)) == 1
    second = x.group_max(torch.where(leads, -x.group_max(-R), R))
    lead = torch.where(leads & alone, best - second, torch.zeros_like(R))
    return lead / (x.group_std(R) + eps).where(lead != 0, 1.0) if scale else lead
