"""Policy gradient within a total-variation trust region: DPPO-Binary-TV, arXiv:2602.04879."""

from __future__ import annotations

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import Fraction
from rlx.plugins.losses._divergence import masked_policy_gradient, probabilities


def dppo_tv(x: LossInputs, *, delta: Fraction = 0.15) -> Tensor:
    """Policy gradient without the tokens that would leave a total-variation bound.

    Formula: −M·ρ·A; M = 0 where |π − π_old| > delta and A pushes π further away, else 1.
    Source: DPPO with the binary (sampled token or not) approximation, arXiv:2602.04879.
    Use: in place of the ratio clip, which silences rare tokens and lets frequent ones drift.

    Args:
        delta: bound on the change of the sampled token's probability.

    Returns:
        [N].
    """
    new, old = probabilities(x)
    return masked_policy_gradient(x, (new - old).abs(), delta)
