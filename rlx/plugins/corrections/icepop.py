"""w inside the band, 0 outside: IcePop, of Ring-1T, arXiv:2510.18855."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import CorrectionInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(ordered=("low", "high"), ratio="token")
def icepop(x: CorrectionInputs, *, low: NonNegative = 0.5, high: NonNegative = 5.0) -> Tensor:
    """Importance weight of each token; tokens on which the two sides disagree are masked.

    Formula: w = exp(old − rollout) where low ≤ w ≤ high, else 0.
    Source: IcePop, Ring-1T, arXiv:2510.18855.
    Use: mixture-of-experts models, where a routing flip makes a few tokens wholly wrong.

    Args:
        low: smallest weight that counts.
        high: largest weight that counts.

    Returns:
        [N].
    """
    w = x.ratio
    return torch.where((w >= low) & (w <= high), w, torch.zeros_like(w))
