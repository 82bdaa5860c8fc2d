"""A_t = R − mean_g on every token, whitened: REINFORCE++-baseline, arXiv:2501.03262."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor


@component(requires={"groups"})
def reinforce_baseline(x: EstimatorInputs, *, whiten: bool = True) -> Tensor:
    """Group-centred rewards on every action token, whitened over the batch.

    Formula: (R − mean_g) + Σ_{s≥t} −β·k_s, then whitened over all action tokens.
    Source: REINFORCE++-baseline, arXiv:2501.03262.
    Use: the default advice for verifiable rewards; one scale for the whole batch.

    Args:
        whiten: divide by the batch's standard deviation; false only centres.

    Returns:
        [N].
    """
    outcome = x.to_tokens(x.rewards - x.group_mean(x.rewards))
    return x.whiten(outcome + x.discounted_sum(x.kl_rewards), scale=whiten)
