"""Spaced repetition: what the policy solves comes back later and later, what it fails at once.

    box of a task  ←  box + 1 when the mean reward of its group is ≥ promote, else 0
    due            =  now + 2^box rounds

One half of a round are tasks that are due, the most overdue first, the other half tasks that were
never tried; when these are too few, those that are due soonest.

Source: Leitner, "So lernt man lernen", 1972.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from rlx import Group, Task


class Leitner:
    """Chooses tasks from boxes; every group is kept.

    Args:
        promote: mean reward of a group from which on its task counts as solved.
        boxes: number of boxes; a task in the last one waits 2^(boxes − 1) rounds.
    """

    def __init__(self, *, promote: float = 0.75, boxes: Annotated[int, Ge(1)] = 6) -> None:
        self.promote = promote
        self.boxes = boxes
        self._order: list[str] = []
        self._tasks: dict[str, Task] = {}
        self._round = 0
        self._box: dict[str, int] = {}
        self._due: dict[str, int] = {}

    def bind(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks = {task.id: task for task in tasks}
        self._order = sorted(self._tasks)
        random.Random(seed).shuffle(self._order)

    def next_tasks(self, n: int) -> list[Task]:
        self._round += 1
        tried = sorted((name for name in self._order if name in self._due), key=self._when)
        due = [name for name in tried if self._due[name] <= self._round]
        new = [name for name in self._order if name not in self._due]
        share = n // 2 if new else n
        chosen = [*due[:share], *new, *due[share:], *tried[len(due) :]][:n]
        for name in chosen:  # handed out: not again before its result is known
            self._due[name] = self._round + 1
        return [self._tasks[name] for name in chosen]

    def update(self, groups: Sequence[Group]) -> None:
        for group in groups:
            name = group.task.id
            solved = sum(group.rewards) / len(group.rewards) >= self.promote
            box = self._box.get(name, -1) + 1 if solved else 0
            self._box[name] = min(box, self.boxes - 1)
            self._due[name] = self._round + 2 ** self._box[name]

    def state_dict(self) -> dict[str, Any]:
        return {"round": self._round, "box": dict(self._box), "due": dict(self._due)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._round = state["round"]
        self._box, self._due = dict(state["box"]), dict(state["due"])

    def _when(self, name: str) -> tuple[int, str]:
        return (self._due[name], name)
