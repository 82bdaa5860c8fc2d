"""The numbers over all samples of `rlx generate`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

from rlx.core.samples import SampledTask


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTotals:
    """Means are over samples; None where there is none."""

    tasks: int
    """Tasks with samples."""
    failed: int
    """Tasks without: a reward failed."""
    samples: int
    reward_mean: float | None
    best_mean: float | None
    """Mean over tasks of the highest reward."""
    parts: Mapping[str, float]
    """Mean of each reward, before weights."""
    tokens: int
    """Sampled, in all."""
    length_mean: float | None
    truncated_rate: float | None
    """Share of the samples that ran out of tokens."""

    @classmethod
    def of(cls, tasks: Iterable[SampledTask]) -> Self:
        """Count one task after the other; none is kept."""
        counts: Counter[str] = Counter()
        rewards, best = _Mean(), _Mean()
        parts: dict[str, _Mean] = {}
        for task in tasks:
            counts["tasks" if task.samples else "failed"] += 1
            for sample in task.samples:
                counts["tokens"] += sample.tokens
                counts["truncated"] += sample.truncated
                rewards.add(sample.reward)
                for name, value in sample.parts.items():
                    parts.setdefault(name, _Mean()).add(value)
            if task.samples:
                best.add(max(sample.reward for sample in task.samples))
        samples = rewards.count
        return cls(
            tasks=counts["tasks"],
            failed=counts["failed"],
            samples=samples,
            reward_mean=rewards.value,
            best_mean=best.value,
            parts={name: mean.value or 0.0 for name, mean in parts.items()},
            tokens=counts["tokens"],
            length_mean=counts["tokens"] / samples if samples else None,
            truncated_rate=counts["truncated"] / samples if samples else None,
        )


@dataclass(slots=True)
class _Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.total = math.fsum((self.total, value))
        self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None
