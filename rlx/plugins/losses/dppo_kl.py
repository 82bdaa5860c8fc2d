"""Policy gradient within a KL trust region: DPPO-Binary-KL, arXiv:2602.04879."""

from __future__ import annotations

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative
from rlx.plugins.losses._divergence import masked_policy_gradient, probabilities

_SMALLEST = 1e-8


def dppo_kl(x: LossInputs, *, delta: NonNegative = 0.05) -> Tensor:
    """Policy gradient without the tokens that would leave a KL bound.

    Formula: −M·ρ·A; M = 0 where KL(Bernoulli(π_old) ‖ Bernoulli(π)) > delta and A pushes π further
    away, else 1.
    Source: DPPO with the binary (sampled token or not) approximation, arXiv:2602.04879.
    Use: as `dppo_tv`; more sensitive where probabilities come near 0 or 1.

    Args:
        delta: bound on the divergence in nats.

    Returns:
        [N].
    """
    new, old = probabilities(x)
    others = ((1 - old).clamp(min=_SMALLEST) / (1 - new).clamp(min=_SMALLEST)).log()
    divergence = (1 - old) * others - old * x.log_ratio.detach()
    return masked_policy_gradient(x, divergence, delta)
