"""A reward model from preferences: the chosen answer scores higher; Bradley & Terry, 1952."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import softplus

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ranges import NonNegative


@component(data="pairs", head="score", per="pair")
def rm(
    x: ObjectiveInputs,
    *,
    form: Literal["sigmoid", "log_exp"] = "sigmoid",
    center: NonNegative = 0.0,
) -> ObjectiveOutputs:
    """Negative log-likelihood that the chosen one is preferred.

    Formula: −log σ(c − r − margin), or log(1 + e^(r − c)); plus center·(c + r)².
    Source: arXiv:1909.08593; the margin: Llama 2, arXiv:2307.09288 (section 3.2.2); the centring:
    arXiv:2312.09244.

    Args:
        form: `log_exp` leaves the margins out.
        center: keeps scores near 0, which preferences alone leave undetermined.

    Returns:
        [K]. Metrics: `accuracy` (a tie counts half), `reward_margin`, `reward_chosen`,
        `reward_rejected`.
    """
    c, r = x.chosen(x.scores), x.rejected(x.scores)
    # Both as softplus, which neither overflows nor loses digits.
    loss = softplus(r - c + x.margin) if form == "sigmoid" else softplus(r - c)
    gap = (c - r).detach()
    return ObjectiveOutputs(
        loss + center * (c + r) ** 2,
        {
            "accuracy": torch.where(gap == 0, 0.5, (gap > 0).to(gap.dtype)),
            "reward_margin": gap,
            "reward_chosen": c,
            "reward_rejected": r,
        },
    )
