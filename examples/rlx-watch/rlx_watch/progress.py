"""The best reward of a run so far and how long ago it was."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

REWARD = "reward/mean"


@dataclass(slots=True)
class Progress:
    """What is known of a run."""

    step: int = 0
    reward: float = math.nan
    """Of the last step."""
    best: float = -math.inf
    best_step: int = 0

    def see(self, step: int, reward: float | None) -> None:
        """Take in a step; one without a reward is passed over."""
        if reward is None or math.isnan(reward):
            return
        self.step, self.reward = step, reward
        if reward > self.best:
            self.best, self.best_step = reward, step

    @property
    def stalled(self) -> int:
        """Steps since the best one."""
        return self.step - self.best_step


def read(metrics: Path) -> Progress:
    """Return the progress that a run's `metrics.jsonl` tells of."""
    progress = Progress()
    for line in metrics.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        progress.see(record["step"], record.get(REWARD))
    return progress
