"""Generalised advantage estimation: arXiv:1506.02438, as in PPO, arXiv:1707.06347."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import Advantages, EstimatorInputs
from rlx.core.ranges import Fraction


@component(requires={"values"})
def gae(
    x: EstimatorInputs, *, gamma: Fraction = 1.0, lam: Fraction = 0.95, whiten: bool = True
) -> Advantages:
    """Exponentially weighted temporal-difference errors of a critic, whitened over the batch.

    Formula: δ_t = r_t + γ·V_{t+1} − V_t, A_t = δ_t + γλ·A_{t+1}, V = 0 after the last action token;
    returns A + V before whitening.
    Source: GAE, arXiv:1506.02438; PPO, arXiv:1707.06347.
    Use: with a critic. Steps are action tokens: what the environment says in between is skipped.

    Args:
        gamma: discount per action token.
        lam: 0 trusts the critic, 1 the observed rewards.
        whiten: divide by the batch's standard deviation; false only centres.

    Returns:
        Advantages with [N] advantages and [N] returns.
    """
    errors = x.token_rewards + gamma * x.next_token(x.values) - x.values
    advantages = x.discounted_sum(errors, gamma * lam)
    return Advantages(x.whiten(advantages, scale=whiten), returns=advantages + x.values)
