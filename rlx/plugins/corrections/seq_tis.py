"""w = clamp(Π_t π_learner/π_engine, low, high): truncated importance sampling of whole rollouts."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import CorrectionInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(ordered=("low", "high"), ratio="sequence")
def seq_tis(x: CorrectionInputs, *, low: NonNegative = 0.0, high: NonNegative = 5.0) -> Tensor:
    """Importance weight of the rollout on each of its tokens, truncated.

    Formula: clamp(exp(Σ_t (old − rollout)), low, high).
    Source: Liu et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", 2025.
    Use: short responses: unbiased up to the truncation, with a variance that grows with length.

    Args:
        low: smallest weight.
        high: largest weight.

    Returns:
        [N].
    """
    return x.sequence_ratio.clamp(low, high)
