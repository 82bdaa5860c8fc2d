"""PPO without the tokens of highest covariance: Clip-Cov, arXiv:2505.22617."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import LossInputs, LossOutputs
from rlx.core.ranges import Fraction, NonNegative
from rlx.plugins.losses._covariance import highest_covariance


@component(requires={"old_logprobs"})
def clip_cov(
    x: LossInputs,
    *,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    fraction: Fraction = 2e-4,
    cov_low: float = 1.0,
    cov_high: float = 5.0,
) -> LossOutputs:
    """Clipped surrogate that leaves out the few tokens that cost most entropy.

    Formula: 0 for the `fraction` of tokens with the highest (log π_old − mean)·(A − mean) between
    cov_low and cov_high; PPO's surrogate for the others.
    Source: Clip-Cov, arXiv:2505.22617 (which draws at random within the band; here the highest are
    taken, so that a step is reproducible).
    Use: when entropy collapses early.

    Args:
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
        fraction: share of the optimizer step's tokens to leave out, at least one.
        cov_low: tokens with less covariance always learn.
        cov_high: and so do tokens with more.

    Returns:
        [N], and `cov_clip_rate`.
    """
    A, ratio = x.advantages, x.ratio
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    chosen = highest_covariance(x, fraction=fraction, low=cov_low, high=cov_high)
    kept = torch.where(chosen, torch.zeros_like(surrogate), surrogate)
    return LossOutputs(-kept, {"cov_clip_rate": chosen})
