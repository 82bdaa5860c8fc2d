"""A_i = R_i − R(greedy rollout of the same task): ReMax, arXiv:2310.10505."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(greedy=True)
def remax(x: EstimatorInputs) -> Tensor:
    """Rewards against the greedy rollout's reward.

    Formula: R − R_greedy of the same task.
    Source: ReMax, arXiv:2310.10505.
    Use: one rollout per task is enough; costs one more, greedy, rollout per task.

    Returns:
        [B].
    """
    return x.rewards - x.greedy_rewards
