"""A_t = G_t = r_t + γ·G_{t+1}, whitened: REINFORCE++, arXiv:2501.03262."""

from __future__ import annotations

from rlx.core.inputs import EstimatorInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import Fraction


def reinforce(x: EstimatorInputs, *, gamma: Fraction = 1.0, whiten: bool = True) -> Tensor:
    """Discounted return of each action token, whitened over the batch.

    Formula: G_t = r_t + γ·G_{t+1} within the rollout, then whitened over all action tokens.
    Source: REINFORCE++, arXiv:2501.03262.
    Use: no critic and no groups; per-turn rewards and KL in the reward count from where they fall.

    Args:
        gamma: discount per action token.
        whiten: divide by the batch's standard deviation; false only centres.

    Returns:
        [N].
    """
    return x.whiten(x.discounted_sum(x.token_rewards, gamma), scale=whiten)
