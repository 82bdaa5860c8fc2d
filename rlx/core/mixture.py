"""Several data sets as one sequence of tasks, drawn in the shares that the user wants.

    source of draw i  =  argmax over s of  p_s · (i + 1) − drawn_s        (ties: the first)

At every moment each source has had its share of the draws to within a few tasks: the mixture of
a batch does not wander, as it would under random draws, and the state is one counter per source.
Within a source, tasks come in epochs, each in an order of its own.
"""

from __future__ import annotations

import bisect
import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, overload

from rlx.core.errors import UsageError
from rlx.core.rollouts import Task
from rlx.core.task_stream import TaskStream, other_data

_TOLERANCE = 1e-6


class TaskMixture(Sequence[Task]):
    """The tasks of all sources, one source after the other.

    Args:
        sources: name → tasks.
        probabilities: name → share of the draws, summing to 1; None: every task once an epoch.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[Task]],
        probabilities: Mapping[str, float] | None = None,
    ) -> None:
        self.sources = dict(sources)
        self.probabilities = None if probabilities is None else dict(probabilities)
        self._parts = list(self.sources.values())
        self._starts = [0, *itertools.accumulate(len(part) for part in self._parts)]

    @property
    def max_prompt_tokens(self) -> int | None:
        """Set while longer prompts may still be met in some source."""
        limits = [getattr(part, "max_prompt_tokens", None) for part in self._parts]
        return next((limit for limit in limits if limit is not None), None)

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        index %= len(self)
        part = bisect.bisect_right(self._starts, index) - 1
        return self._parts[part][index - self._starts[part]]


class MixedStream:
    """Endless draws from a mixture with probabilities; each source in epochs of its own."""

    def __init__(self, tasks: TaskMixture, seed: int, *, shuffle: bool = True) -> None:
        assert tasks.probabilities is not None
        self._probabilities = dict(tasks.probabilities)
        self._streams = {
            name: TaskStream(part, [seed, zlib.crc32(name.encode())], shuffle=shuffle)
            for name, part in tasks.sources.items()
        }

    def next(self, n: int) -> list[Task]:
        """The next n tasks."""
        return [self._streams[self._next_source()].next(1)[0] for _ in range(n)]

    def _next_source(self) -> str:
        drawn = {name: stream.position for name, stream in self._streams.items()}
        count = sum(drawn.values()) + 1
        return max(drawn, key=lambda name: self._probabilities[name] * count - drawn[name])

    def state_dict(self) -> dict[str, Any]:
        return {
            "sources": {name: stream.state_dict() for name, stream in self._streams.items()},
            "probabilities": dict(self._probabilities),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position; raises UsageError when sources or shares have changed."""
        saved = state.get("probabilities")
        if saved != self._probabilities:
            raise other_data(_shares(saved), _shares(self._probabilities))
        for name, stream in self._streams.items():
            stream.load_state_dict(state["sources"][name])


def check_probabilities(given: Mapping[str, float | None]) -> None:
    """Raise UsageError unless all sources have a probability and they sum to 1, or none has one."""
    missing = [name for name, share in given.items() if share is None]
    total = math.fsum(share for share in given.values() if share is not None)
    if len(missing) == len(given):
        return
    if missing:
        raise UsageError(
            f"some data sources have a probability, and {', '.join(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} none",
            where="data.sources",
            fix="give every source one, or none (then each row comes once an epoch)",
        )
    if abs(total - 1) > _TOLERANCE:
        scaled = ", ".join(f"{name} {(share or 0) / total:.4g}" for name, share in given.items())
        raise UsageError(
            f"the probabilities of the data sources sum to {total:g}, not to 1",
            where="data.sources",
            fix=f"in the same proportions: {scaled}",
        )


def _shares(probabilities: Mapping[str, float] | None) -> str:
    if probabilities is None:
        return "one data set"
    return ", ".join(f"{share:.4g} {name}" for name, share in probabilities.items())
