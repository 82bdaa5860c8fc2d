"""w = 1: engine and learner are taken to agree."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import CorrectionInputs
from rlx.core.ragged import Tensor


@component(ratio="none")
def none(x: CorrectionInputs) -> Tensor:
    """No correction; the mismatch is still measured.

    Formula: 1.
    Use: float32 on both sides, or a mismatch (`mismatch/*`) that stays small.

    Returns:
        [N].
    """
    return torch.ones_like(x.old_logprobs)
