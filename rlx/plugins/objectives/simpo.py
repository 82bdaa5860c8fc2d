"""Preferences without a reference model, by the mean log-prob of a token; arXiv:2405.14734."""

from __future__ import annotations

from torch.nn.functional import softplus

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ranges import NonNegative, Positive
from rlx.plugins.objectives._preferences import metrics


@component(data="pairs", head="lm", per="pair")
def simpo(
    x: ObjectiveInputs, *, beta: Positive = 2.0, gamma: NonNegative = 1.0
) -> ObjectiveOutputs:
    """Logistic loss on the difference of length-normalised log-probs, less a target margin.

    Formula: −log σ(β·(m_c − m_r) − γ), m = mean_t log π.
    Source: arXiv:2405.14734.

    Args:
        beta: scale of the implicit reward β·m.
        gamma: γ, by how much the chosen one's reward should be higher.

    Returns:
        [K]. Metrics: `accuracy`, `reward_margin`, `reward_chosen`, `reward_rejected` (β·m),
        `logprob_chosen`, `logprob_rejected`.
    """
    rewards = beta * x.sequence_mean(x.logprobs)
    gap = x.chosen(rewards) - x.rejected(rewards)
    return ObjectiveOutputs(softplus(gamma - gap), metrics(x, rewards))
