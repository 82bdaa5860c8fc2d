"""Answers that are good or bad, without pairs, by prospect theory; arXiv:2402.01306."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ranges import NonNegative, Positive


@component(data="unpaired", head="lm", per="sequence", requires={"ref_logprobs", "kl_baseline"})
def kto(
    x: ObjectiveInputs,
    *,
    beta: Positive = 0.1,
    desirable_weight: NonNegative = 1.0,
    undesirable_weight: NonNegative = 1.0,
) -> ObjectiveOutputs:
    """Distance from full value of each answer, seen from the policy's present KL.

    Formula: Δ = Σ_t log π/π_ref, z = max(KL, 0); λ_D·(1 − σ(β·(Δ − z))) for a desirable answer,
    λ_U·(1 − σ(β·(z − Δ))) for an undesirable one. KL is the mean Δ of mismatched answers over
    the whole optimizer step, without gradient.
    Source: arXiv:2402.01306.

    Args:
        beta: how dear it is to leave the reference.
        desirable_weight: λ_D; with n_D desirable and n_U undesirable rows, keep λ_D·n_D within
            1 to 4/3 of λ_U·n_U.
        undesirable_weight: λ_U.

    Returns:
        [B]. Metrics: `reward_desirable`, `reward_undesirable` (β·Δ), `kl`.
    """
    delta = x.sequence_sum(x.log_ratio)
    above = beta * (delta - x.kl_baseline.clamp(min=0))
    loss = torch.where(
        x.desirable,
        desirable_weight * (1 - torch.sigmoid(above)),
        undesirable_weight * (1 - torch.sigmoid(-above)),
    )
    rewards = beta * delta
    return ObjectiveOutputs(
        loss,
        {
            "reward_desirable": rewards[x.desirable],
            "reward_undesirable": rewards[~x.desirable],
            "kl": x.kl_baseline,
        },
    )
