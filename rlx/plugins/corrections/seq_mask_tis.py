"""Token weights of the rollouts whose geometric-mean ratio is in the band, 0 for the others."""

from __future__ import annotations

import torch

from rlx.core.component import component
from rlx.core.inputs import CorrectionInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(ordered=("low", "high"), ratio="token")
def seq_mask_tis(x: CorrectionInputs, *, low: NonNegative = 0.5, high: NonNegative = 5.0) -> Tensor:
    """Truncated importance weight of each token; rollouts that drifted as a whole are masked.

    Formula: clamp(w, low, high) where low ≤ exp(mean_t log w) ≤ high over the rollout, else 0,
    with w = exp(old − rollout).
    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", 2025.
    Use: long responses, where a sequence product is useless; narrow the band to mask earlier.

    Args:
        low: smallest weight, and smallest geometric mean of a rollout that counts.
        high: largest of both.

    Returns:
        [N].
    """
    w, mean = x.ratio, x.sequence_mean_ratio
    return torch.where((mean >= low) & (mean <= high), w.clamp(low, high), torch.zeros_like(w))
