"""Distillation: the student's distribution of each token is drawn to the teacher's.

Generalised divergences: GKD, arXiv:2306.13649; temperature: Hinton et al., arXiv:1503.02531.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

import torch
from pydantic import Field

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ragged import Tensor, at_least_float32
from rlx.core.ranges import NonNegative, Positive


@component(data="conversations", head="logits", per="token", requires={"teacher_logits"})
def distill(
    x: ObjectiveInputs,
    *,
    divergence: Literal["forward_kl", "reverse_kl", "js"] = "forward_kl",
    beta: Annotated[float, Field(gt=0, lt=1)] = 0.5,
    temperature: Positive = 1.0,
    nll_coef: NonNegative = 0.0,
) -> ObjectiveOutputs:
    """Divergence between teacher and student over the whole vocabulary, at each trained token.

    Formula: p = softmax(teacher/τ), q = softmax(student/τ). forward_kl: Σ_v p·log(p/q); reverse_kl:
    Σ_v q·log(q/p); js: β·KL(p ‖ m) + (1 − β)·KL(q ‖ m) with m = β·p + (1 − β)·q.
    − nll_coef·log softmax(student)[y].
    Source: arXiv:2306.13649, equation 1.
    Use: forward KL covers all that the teacher does, reverse KL and js near 1 stay with what it
    does most. With data that the student wrote (`rlx generate`) it corrects its own mistakes.

    Args:
        divergence: which of the three.
        beta: of js; for β → 0 js/β is the forward KL, for β → 1 js/(1 − β) the reverse KL.
        temperature: τ, of both distributions; gradients shrink with 1/τ².
        nll_coef: weight of the data's own tokens.

    Returns:
        [N]. Metrics: `agreement` (share of tokens where both would choose the same), `nll`.
    """
    student, teacher = at_least_float32(x.logits), at_least_float32(x.teacher_logits)
    q = torch.log_softmax(student / temperature, -1)
    p = torch.log_softmax(teacher / temperature, -1)
    if divergence == "forward_kl":
        loss = _kl(p, q)
    elif divergence == "reverse_kl":
        loss = _kl(q, p)
    else:
        m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
        loss = beta * _kl(p, m) + (1 - beta) * _kl(q, m)
    nll = torch.logsumexp(student, -1) - student.gather(-1, x.targets[:, None])[:, 0]
    agreement = (student.argmax(-1) == teacher.argmax(-1)).to(loss.dtype)
    return ObjectiveOutputs(loss + nll_coef * nll, {"agreement": agreement, "nll": nll.detach()})


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """KL of each row from log-probs: [N, V], [N, V] -> [N]."""
    return torch.linalg.vecdot(p.exp(), p - q)
