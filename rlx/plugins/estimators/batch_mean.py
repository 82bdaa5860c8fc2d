"""A_i = R_i − mean over the batch: REINFORCE with a batch baseline (Williams, 1992)."""

from __future__ import annotations

from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


def batch_mean(x: EstimatorInputs) -> Tensor:
    """Rewards centred over the whole batch.

    Formula: R − mean(R).
    Source: REINFORCE (Williams, 1992) with a batch baseline.
    Use: one rollout per task is enough; the baseline ignores how hard a task is.

    Returns:
        [B].
    """
    return x.rewards - x.batch_mean(x.rewards)
