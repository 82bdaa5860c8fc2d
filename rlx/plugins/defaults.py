"""What a run uses where nothing is selected. The core asks by setting and knows no name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

DEFAULTS: Final[Mapping[str, tuple[str, ...]]] = {
    "estimator": ("group_norm",),
    "loss": ("ppo",),
    "correction": ("none",),
    "objective": ("sft",),
    "agent": ("single_turn",),
    "sampler": ("uniform",),
    "rewards": ("exact_match",),
    "trackers": ("jsonl", "console", "tensorboard"),
}

STALE_CORRECTION: Final = "tis"
"""The correction of a run whose rollouts may be older than the weights that they train."""
