"""Identity preference optimisation: a margin to reach, not to exceed; arXiv:2310.12036."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.ranges import Positive
from rlx.plugins.objectives._preferences import metrics


@component(data="pairs", head="lm", per="pair", requires={"ref_logprobs"})
def ipo(
    x: ObjectiveInputs, *, beta: Positive = 0.1, length_normalized: bool = False
) -> ObjectiveOutputs:
    """Squared distance of the log-ratios' difference from 1/(2β).

    Formula: (Δ_c − Δ_r − 1/(2β))², Δ = Σ_t log π/π_ref.
    Source: arXiv:2310.12036 (equation 17, τ = β).
    Use: preferences that are (nearly) deterministic, on which a logistic loss never stops pulling.

    Args:
        beta: the margin is 1/(2β).
        length_normalized: Δ is the mean over tokens, so that the margin is one per token.

    Returns:
        [K]. Metrics: `accuracy`, `reward_margin`, `reward_chosen`, `reward_rejected` (β·Δ),
        `logprob_chosen`, `logprob_rejected`.
    """
    reduce = x.sequence_mean if length_normalized else x.sequence_sum
    delta = reduce(x.log_ratio)
    gap = x.chosen(delta) - x.rejected(delta)
    return ObjectiveOutputs((gap - 1 / (2 * beta)) ** 2, metrics(x, beta * delta))
