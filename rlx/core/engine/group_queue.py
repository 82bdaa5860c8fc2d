"""Which groups begin next: those that a checkpoint says were begun, then new tasks of the sampler.

What is under way when a run is saved is kept in the same form whether generation runs ahead or not,
so that a run may be resumed with another `max_staleness` and still skips no task.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from rlx.core.rollouts import Group, Task
from rlx.core.samplers import BoundSampler

Begun: TypeAlias = tuple[int, Task]
"""A group's number, from which its seeds follow, and its task."""


@dataclass(frozen=True, slots=True)
class Started:
    """A group that is being made, or is made and waits to be trained on."""

    number: int
    task: Task
    version: int
    """The engine's policy version when it began."""


class GroupQueue:
    """Numbers the groups of a run."""

    def __init__(self, sampler: BoundSampler) -> None:
        self._sampler = sampler
        self._next = 0
        self._again: list[Begun] = []

    def take(self, count: int) -> list[Begun]:
        """The next groups, as many as `count` unless the sampler has fewer."""
        again, self._again = self._again[:count], self._again[count:]
        if len(again) == count:
            return again
        tasks = self._sampler.next_tasks(count - len(again))
        numbers = range(self._next, self._next + len(tasks))
        self._next += len(tasks)
        return [*again, *zip(numbers, tasks, strict=True)]

    def put_back(self, groups: Sequence[Begun]) -> None:
        """Begin these again before any other."""
        self._again = sorted([*groups, *self._again], key=lambda one: one[0])

    def clear(self) -> None:
        """Forget those that were to begin again."""
        self._again.clear()

    def state_dict(
        self,
        ready: Sequence[tuple[Started, Group]] = (),
        running: Sequence[Started] = (),
    ) -> dict[str, Any]:
        """Finished groups that wait are kept as they are, unfinished ones begin again."""
        unfinished = [(one.number, one.task) for one in running]
        kept = {"ready": list(ready), "running": [*unfinished, *self._again]}
        # Tasks hold whatever the data held, which a state of primitives can't.
        return {"next_group": self._next, "in_flight": pickle.dumps(kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[tuple[Started, Group]]:
        """Take up what was under way; returns the finished groups that waited."""
        self._next = state["next_group"]
        if "in_flight" not in state:  # of a version in which runs that take turns kept none
            return []
        in_flight = pickle.loads(state["in_flight"])
        self._again = in_flight["running"]
        ready: list[tuple[Started, Group]] = in_flight["ready"]
        return ready
