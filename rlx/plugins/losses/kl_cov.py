"""A KL penalty on the tokens of highest covariance: KL-Cov, arXiv:2505.22617."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import LossInputs, LossOutputs
from rlx.core.ranges import Fraction, NonNegative
from rlx.plugins.losses._covariance import highest_covariance


@component(requires={"old_logprobs"})
def kl_cov(x: LossInputs, *, fraction: Fraction = 2e-4, kl_coef: NonNegative = 1.0) -> LossOutputs:
    """Unclipped surrogate that holds back the few tokens that cost most entropy.

    Formula: −ρA, plus kl_coef·|log ρ| for the `fraction` of tokens with the highest positive
    (log π_old − mean)·(A − mean).
    Source: KL-Cov, arXiv:2505.22617.
    Use: when entropy collapses early; gentler than `clip_cov`.

    Args:
        fraction: share of the optimizer step's tokens to penalise, at least one.
        kl_coef: weight of the penalty.

    Returns:
        [N], and `cov_penalty_rate`.
    """
    chosen = highest_covariance(x, fraction=fraction, low=0.0, high=float("inf"))
    surrogate = -x.ratio * x.advantages
    penalised = surrogate + kl_coef * x.log_ratio.abs()
    return LossOutputs(torch.where(chosen, penalised, surrogate), {"cov_penalty_rate": chosen})
