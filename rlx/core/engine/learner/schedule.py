"""The learning rate as a function of the optimizer steps taken, so that resuming is exact."""

from __future__ import annotations

import math
from typing import Literal

from rlx.core.config import LearnerConfig


def learning_rate(settings: LearnerConfig, taken: int, total: int) -> float:
    """Rate of the optimizer step that follows `taken` of `total`.

    Warm-up rises linearly to `lr` at step `warmup_steps`; `linear` and `cosine` then fall so that
    the step after the last would be at 0.
    """
    if taken < settings.warmup_steps:
        return settings.lr * (taken + 1) / settings.warmup_steps
    span = max(1, total - settings.warmup_steps)
    return settings.lr * _decay(settings.schedule, min(1.0, (taken - settings.warmup_steps) / span))


def _decay(schedule: Literal["constant", "linear", "cosine"], progress: float) -> float:
    """Factor in [0, 1] at `progress` in [0, 1] through the steps after warm-up."""
    if schedule == "linear":
        return 1.0 - progress
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    return 1.0
