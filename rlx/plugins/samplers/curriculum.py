"""Curriculum: prefer tasks that the policy solves about as often as `target`.

    rate_i   ←  (1 − α) · rate_i + α · mean(score of the group)        after each attempt
    weight_i =  exp(−½ · ((rate_i − target) / width)²) + floor         untried tasks: rate = target
    n tasks  ~  without replacement, with probability ∝ weight         (Gumbel top-n)

The variance of a 0/1 reward, and with it the expected size of a group-normalised gradient, is
largest at a pass rate of one half.

Source: the learnability argument of Foster et al. 2025 (arXiv:2502.12272); Gumbel top-k by
Kool et al. 2019 (arXiv:1903.06059).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Gt, Le

from rlx.core.errors import UsageError
from rlx.core.rollouts import Group, Task


class Curriculum:
    """Draw tasks by their running pass rate; every group is kept."""

    def __init__(
        self,
        *,
        target: Annotated[float, Ge(0), Le(1)] = 0.5,
        width: Annotated[float, Gt(0)] = 0.25,
        alpha: Annotated[float, Gt(0), Le(1)] = 0.5,
        floor: Annotated[float, Ge(0)] = 0.02,
    ) -> None:
        """
        Args:
            target: preferred pass rate, for rewards between 0 and 1.
            width: how fast the preference falls off on both sides of the target.
            alpha: share of the newest attempt in the running pass rate.
            floor: weight of tasks far from the target, so that they are tried again now and then.
        """
        self.target = target
        self.width = width
        self.alpha = alpha
        self.floor = floor
        self._tasks: Sequence[Task] = ()
        self._seed = 0
        self._draws = 0
        self._rates = np.empty(0)  # [P] running pass rate, NaN while untried
        self._index: dict[str, int] = {}  # of the tasks drawn so far

    def bind(self, tasks: Sequence[Task], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._rates = np.full(len(tasks), np.nan)

    def next_tasks(self, n: int) -> list[Task]:
        rng = np.random.Generator(np.random.PCG64([self._seed, self._draws]))
        self._draws += 1
        rates = np.where(np.isnan(self._rates), self.target, self._rates)
        weights = np.exp(-0.5 * ((rates - self.target) / self.width) ** 2) + self.floor
        keys = np.log(np.maximum(weights, 1e-300)) + rng.gumbel(size=len(rates))
        chosen = np.argsort(-keys, kind="stable")[:n]
        drawn = []
        for index in chosen.tolist():
            task = self._tasks[index]
            self._index[task.id] = index
            drawn.append(task)
        return drawn

    def keep(self, group: Group) -> bool:
        return True

    def update(self, groups: Sequence[Group]) -> None:
        for group in groups:
            index = self._index.get(group.task.id)
            if index is None:
                continue
            solved = min(1.0, max(0.0, sum(group.rewards) / len(group.rewards)))
            before = self._rates[index]
            self._rates[index] = (
                solved if np.isnan(before) else (1 - self.alpha) * before + self.alpha * solved
            )

    def state_dict(self) -> dict[str, Any]:
        tried = np.flatnonzero(~np.isnan(self._rates))
        return {
            "draws": self._draws,
            "tasks": len(self._rates),
            "tried": tried.tolist(),
            "rates": self._rates[tried].tolist(),
            "index": dict(self._index),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if len(self._rates) and state["tasks"] != len(self._rates):
            raise UsageError(
                f"the checkpoint's curriculum is over {state['tasks']} tasks, the data has "
                f"{len(self._rates)}",
                where="data",
                fix="resume with the same data, or start a new run",
            )
        self._draws = state["draws"]
        self._rates = np.full(state["tasks"], np.nan)
        self._rates[state["tried"]] = state["rates"]
        self._index = dict(state["index"])
