"""−sg(clip(ρ))·A·log π: CISPO of MiniMax-M1, arXiv:2506.13585."""

from __future__ import annotations

from rlx.core.inputs import LossInputs, LossOutputs
from rlx.core.ranges import NonNegative


def cispo(
    x: LossInputs, *, clip_low: NonNegative = 1.0, clip_high: NonNegative = 0.28
) -> LossOutputs:
    """Policy gradient with a clipped importance weight; every token keeps a gradient.

    Formula: −stop_grad(clip(ρ, 1 − clip_low, 1 + clip_high))·A·log π.
    Source: CISPO, MiniMax-M1, arXiv:2506.13585.
    Use: several updates per batch without silencing rare, decisive tokens.

    Args:
        clip_low: how far the weight may fall below 1; 1 means no lower bound.
        clip_high: how far it may rise above 1.

    Returns:
        [N], and as `clip_rate` the share of tokens whose weight is clipped.
    """
    ratio = x.ratio.detach()
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return LossOutputs(-weight * x.advantages * x.logprobs, {"clip_rate": weight != ratio})
