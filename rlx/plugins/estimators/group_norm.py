"""A_i = (R_i − mean_g) / (std_g + eps): GRPO, arXiv:2402.03300."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(requires={"groups"})
def group_norm(x: EstimatorInputs, *, eps: NonNegative = 1e-9) -> Tensor:
    """Rewards standardised within the group.

    Formula: (R − mean_g) / (std_g + eps), unbiased std; exactly 0 for a constant group.
    Source: GRPO, arXiv:2402.03300.
    Use: the common choice for verifiable rewards; weights easy and hard tasks alike.

    Args:
        eps: keeps nearly constant groups from blowing up.

    Returns:
        [B].
    """
    centred = x.rewards - x.group_mean(x.rewards)
    scale = x.group_std(x.rewards) + eps
    # Without the selection a constant group would be 0/0 at eps = 0.
    return centred / scale.where(centred != 0, 1.0)
