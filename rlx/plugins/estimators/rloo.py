"""A_i = R_i − mean of the other rollouts of the group: RLOO, arXiv:2402.14740."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(requires={"groups"})
def rloo(x: EstimatorInputs) -> Tensor:
    """Rewards against the mean of the group's other rollouts.

    Formula: R − (ΣR_g − R)/(G_g − 1); 0 for a rollout that is alone in its group.
    Source: RLOO, arXiv:2402.14740.
    Use: unbiased, unlike a baseline that contains the rollout itself.

    Returns:
        [B].
    """
    return x.rewards - x.leave_one_out_mean(x.rewards)
