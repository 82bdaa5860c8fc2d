"""A_i = (R_i − mean_g) · groups / groups with variance: GPG, arXiv:2504.02546."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(requires={"groups"})
def gpg(x: EstimatorInputs) -> Tensor:
    """Group-centred rewards, scaled up for the groups that teach nothing.

    Formula: (R − mean_g) · P / #{groups with non-zero variance}.
    Source: Group Policy Gradient, arXiv:2504.02546.
    Use: keeps the step size when many groups are all right or all wrong.

    Returns:
        [B].
    """
    varied = x.group_index[x.group_std(x.rewards) > 0].unique().numel()
    return (x.rewards - x.group_mean(x.rewards)) * (x.group_count / max(varied, 1))
