"""Penalty on rollouts that don't end by themselves."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.rewards import RewardInputs


@component
def stop_properly(sample: RewardInputs, *, penalty: float = -1.0, reward: float = 0.0) -> float:
    """`reward` when the policy ended its response itself, else `penalty`.

    Args:
        penalty: score of a rollout that was cut off: by its token limit, its turn limit or time.
        reward: score of one with `finish_reason` "stop".
    """
    return reward if sample.finish_reason == "stop" else penalty
