"""A process reward model: whether each step of an answer is right; arXiv:2305.20050."""

from __future__ import annotations

from torch.nn.functional import softplus

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs


@component(data="steps", head="token", per="token")
def prm(x: ObjectiveInputs) -> ObjectiveOutputs:
    """Cross-entropy of the judgement at each step's marker.

    Formula: −y·log σ(z) − (1 − y)·log(1 − σ(z)), with z the log-odds of right at the marker and
    y the label, which may be a share of successful continuations (arXiv:2312.08935).

    Returns:
        [N]. Metrics: `accuracy` of steps whose label is not ½, `right_rate` of the predictions.
    """
    z, y = x.token_scores, x.labels.to(x.token_scores.dtype)
    decided = y != 0.5
    right = (z > 0) == (y > 0.5)
    return ObjectiveOutputs(
        softplus(z) - y * z,
        {"accuracy": right[decided].to(z.dtype), "right_rate": (z > 0).to(z.dtype)},
    )
