"""Endless epochs over the tasks of one data set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.core.errors import UsageError
from rlx.core.rollouts import Task


class TaskStream:
    """Endless epochs over P tasks, each in an order of its own that (seed, epoch) determine.

    The state is a position, so a resumed stream neither skips nor repeats a task.
    """

    def __init__(
        self, tasks: Sequence[Task], seed: int | Sequence[int], *, shuffle: bool = True
    ) -> None:
        if len(tasks) == 0:
            raise UsageError("there are no tasks to sample", where="data.path")
        self.position = 0
        """Tasks drawn so far."""
        self._tasks = tasks
        self._seed = [seed] if isinstance(seed, int) else list(seed)
        self._shuffle = shuffle
        self._order_epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def epoch(self) -> int:
        """Complete passes over the tasks so far."""
        return self.position // len(self._tasks)

    def next(self, n: int) -> list[Task]:
        """The next n tasks; across the end of an epoch when need be."""
        return [self._tasks[self._next_index()] for _ in range(n)]

    def _next_index(self) -> int:
        epoch, place = divmod(self.position, len(self._tasks))
        self.position += 1
        if not self._shuffle:
            return place
        if epoch != self._order_epoch:
            rng = np.random.Generator(np.random.PCG64([*self._seed, epoch]))
            self._order, self._order_epoch = rng.permutation(len(self._tasks)), epoch
        return int(self._order[place])

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "tasks": len(self._tasks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a saved position; raises UsageError when the number of tasks has changed."""
        saved = state.get("tasks")
        if saved != len(self._tasks):
            made = "a mixture of data sources" if saved is None else f"{saved} tasks"
            raise other_data(made, f"{len(self._tasks)} tasks")
        self.position = int(state["position"])


def other_data(saved: str, now: str) -> UsageError:
    """The error for a checkpoint that was made with other data."""
    return UsageError(
        f"the checkpoint was made with {saved}, the data now has {now}",
        where="data",
        fix="resume with the same data, max_samples and prompt length, or start a new run",
    )
