"""−(4/τ)·sigmoid(τ(ρ − 1))·A: SAPO, arXiv:2511.20347."""

from __future__ import annotations

import torch

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import Positive


def sapo(x: LossInputs, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> Tensor:
    """Surrogate with a soft gate in place of the clip: off-policy tokens fade out.

    Formula: −(4/τ)·sigmoid(τ(ρ − 1))·A, τ = tau_pos where A > 0, else tau_neg.
    Source: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    Use: several updates per batch, where a hard clip loses too many tokens.

    Args:
        tau_pos: sharpness of the gate for positive advantages.
        tau_neg: for the others; larger fades faster.

    Returns:
        [N].
    """
    A = x.advantages
    tau = torch.where(A > 0, torch.full_like(A, tau_pos), torch.full_like(A, tau_neg))
    return -4 / tau * torch.sigmoid(tau * (x.ratio - 1)) * A
