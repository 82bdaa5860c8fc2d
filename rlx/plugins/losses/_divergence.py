"""What the divergence-bounded losses share: which tokens still move within the trust region."""

from __future__ import annotations

import torch

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor


def masked_policy_gradient(x: LossInputs, divergence: Tensor, delta: float) -> Tensor:
    """−M·ρ·A; M is 0 where the divergence exceeds delta and A pushes further away, else 1.

    Away means: A > 0 and ρ > 1, or A < 0 and ρ < 1. The mask carries no gradient.
    """
    A, ratio = x.advantages, x.ratio
    away = torch.where(A > 0, ratio > 1, ratio < 1)
    masked = away & (divergence > delta)
    return -torch.where(masked, torch.zeros_like(ratio), ratio * A)


def probabilities(x: LossInputs) -> tuple[Tensor, Tensor]:
    """π and π_old of the sampled tokens, [N] each, without gradient."""
    return x.logprobs.detach().clamp(max=0).exp(), x.old_logprobs.clamp(max=0).exp()
