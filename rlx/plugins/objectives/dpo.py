"""Direct preference optimisation: the policy is its own reward model; arXiv:2305.18290."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch.nn.functional import softplus

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ranges import NonNegative, Positive
from rlx.plugins.objectives._preferences import metrics


@component(data="pairs", head="lm", per="pair", requires={"ref_logprobs"})
def dpo(
    x: ObjectiveInputs,
    *,
    beta: Positive = 0.1,
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0,
    nll_coef: NonNegative = 0.0,
) -> ObjectiveOutputs:
    """Logistic loss on the difference of implicit rewards.

    Formula: h = β·(Δ_c − Δ_r), Δ = Σ_t log π/π_ref; −(1 − ε)·log σ(h) − ε·log σ(−h)
    − nll_coef·mean_t log π of the chosen one.
    Source: arXiv:2305.18290; ε (cDPO): Mitchell, "A note on DPO with noisy preferences", 2023; the
    likelihood term, which keeps the chosen answer likely: arXiv:2404.19733.

    Args:
        beta: how dear it is to leave the reference; smaller lets the policy go further.
        label_smoothing: ε, share of pairs whose labels are taken to be the wrong way round.
        nll_coef: weight of the chosen answer's negative log-likelihood per token.

    Returns:
        [K]. Metrics: `accuracy`, `reward_margin`, `reward_chosen`, `reward_rejected` (β·Δ),
        `logprob_chosen`, `logprob_rejected`.
    """
    rewards = beta * x.sequence_sum(x.log_ratio)
    h = x.chosen(rewards) - x.rejected(rewards)
    loss = (1 - label_smoothing) * softplus(-h) + label_smoothing * softplus(h)
    likelihood = x.chosen(x.sequence_mean(x.logprobs))
    return ObjectiveOutputs(loss - nll_coef * likelihood, metrics(x, rewards))
