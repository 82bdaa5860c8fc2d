"""Which rows each optimizer step trains on: epochs in orders of the seed, sources in shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from rlx.core.mixture import MixedStream, TaskMixture
from rlx.core.task_stream import TaskStream


class Draws:
    """A finite sequence of row numbers, `batch_size` at a time; the last batch may be smaller.

    Args:
        sizes: source → rows; the rows of all sources are numbered one source after the other.
        probabilities: source → share of the draws; None: every row once an epoch.
        total: rows to draw in all.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        *,
        probabilities: Mapping[str, float] | None,
        seed: int,
        shuffle: bool,
        batch_size: int,
        total: int,
    ) -> None:
        self._batch_size = batch_size
        self._total = total
        self._rows = sum(sizes.values())
        self._drawn = 0
        ends = np.cumsum([*sizes.values()]).tolist()
        ranges: dict[str, Any] = {
            name: range(end - size, end)
            for (name, size), end in zip(sizes.items(), ends, strict=True)
        }
        self._stream: Any = (
            TaskStream(cast("Any", range(self._rows)), seed, shuffle=shuffle)
            if probabilities is None
            else MixedStream(TaskMixture(ranges, probabilities), seed, shuffle=shuffle)
        )

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._drawn / self._rows

    def next(self) -> np.ndarray:
        """The rows of the next optimizer step [≤ batch_size] int64."""
        count = min(self._batch_size, self._total - self._drawn)
        self._drawn += count
        return np.array(self._stream.next(count), np.int64)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn, "stream": self._stream.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position; raises UsageError when the data is another."""
        self._stream.load_state_dict(state["stream"])
        self._drawn = int(state["drawn"])


def rows_and_steps(
    counts: Sequence[int], *, epochs: float, steps: int | None, batch_size: int
) -> tuple[int, int]:
    """Rows to draw and optimizer steps, for sources of so many rows."""
    if steps is not None:
        return steps * batch_size, steps
    rows = max(round(epochs * sum(counts)), 1)
    return rows, math.ceil(rows / batch_size)
