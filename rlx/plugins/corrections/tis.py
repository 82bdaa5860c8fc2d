"""w = clamp(π_learner/π_engine, low, high): truncated importance sampling."""

from __future__ import annotations

from rlx.core.component import component
from rlx.core.inputs import CorrectionInputs
from rlx.core.ragged import Tensor
from rlx.core.ranges import NonNegative


@component(ordered=("low", "high"), ratio="token")
def tis(x: CorrectionInputs, *, low: NonNegative = 0.5, high: NonNegative = 5.0) -> Tensor:
    """Importance weight of each token, truncated.

    Formula: clamp(exp(old − rollout), low, high).
    Source: Ionides, 2008; for engine mismatch Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training", 2025.
    Use: the default remedy when engine and learner differ in precision or kernels.

    Args:
        low: smallest weight.
        high: largest weight.

    Returns:
        [N].
    """
    return x.ratio.clamp(low, high)
