"""A_i = R_i − mean_g, tokens summed over a constant length: Dr. GRPO, arXiv:2503.20783."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(requires={"groups"}, aggregation="seq-mean-token-sum-norm")
def dr_grpo(x: EstimatorInputs) -> Tensor:
    """Rewards centred within the group, without dividing by the deviation.

    Formula: R − mean_g.
    Source: Dr. GRPO, arXiv:2503.20783; names the aggregation `seq-mean-token-sum-norm`.
    Use: no bias towards tasks with little variance, nor towards long wrong answers.

    Returns:
        [B].
    """
    return x.rewards - x.group_mean(x.rewards)
