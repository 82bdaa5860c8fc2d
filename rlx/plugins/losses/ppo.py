"""−min(ρA, clip(ρ, 1−ε_low, 1+ε_high)·A): PPO, arXiv:1707.06347."""

from __future__ import annotations

import torch

from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import AboveOne, NonNegative


def ppo(
    x: LossInputs,
    *,
    clip_low: NonNegative = 0.2,
    clip_high: NonNegative = 0.2,
    dual_clip: AboveOne | None = None,
) -> Tensor:
    """Clipped surrogate: no reward for moving a token's ratio out of the band.

    Formula: −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)·A); with dual_clip c and A < 0:
    −max(min(…), cA).
    Source: PPO, arXiv:1707.06347; dual clip arXiv:1912.09729; clip-higher (0.2/0.28) DAPO,
    arXiv:2503.14476.
    Use: the default. Raise clip_high when entropy collapses.

    Args:
        clip_low: how far the ratio may fall below 1.
        clip_high: how far it may rise above 1.
        dual_clip: bound on the loss of tokens with a negative advantage and a large ratio, > 1.

    Returns:
        [N].
    """
    A, ratio = x.advantages, x.ratio
    surrogate = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    if dual_clip is not None:
        surrogate = torch.where(A < 0, torch.maximum(surrogate, dual_clip * A), surrogate)
    return -surrogate
