"""Fine-tuning and preferences in one, by the odds ratio, without a reference; arXiv:2403.07691."""

from __future__ import annotations

import torch
from torch.nn.functional import softplus

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import Positive
from rlx.plugins.objectives._preferences import metrics

_CERTAIN = -1e-7
"""Mean log-prob beyond which a probability counts as 1: its odds would be infinite."""


@component(data="pairs", head="lm", per="pair")
def orpo(x: ObjectiveInputs, *, beta: Positive = 0.1) -> ObjectiveOutputs:
    """Negative log-likelihood of the chosen one, plus a logistic loss on the log odds ratio.

    Formula: −m_c − β·log σ(log odds(m_c) − log odds(m_r)), m = mean_t log π,
    odds(m) = e^m / (1 − e^m).
    Source: arXiv:2403.07691 (λ = β).

    Args:
        beta: weight of the preference beside the likelihood.

    Returns:
        [K]. Metrics: `accuracy`, `reward_margin`, `reward_chosen`, `reward_rejected` (β·m),
        `logprob_chosen`, `logprob_rejected`, `nll`.
    """
    m = x.sequence_mean(x.logprobs)
    odds = _log_odds(m)
    nll = -x.chosen(m)
    loss = nll + beta * softplus(x.rejected(odds) - x.chosen(odds))
    return ObjectiveOutputs(loss, {**metrics(x, beta * m), "nll": nll})


def _log_odds(m: Tensor) -> Tensor:
    m = m.clamp(max=_CERTAIN)
    return m - torch.log(-torch.expm1(m))
