"""Which tasks are tried and which groups are trained on: `Drop`, `BoundSampler`.

A sampler component is a function `keep(group) -> bool | Drop`, or a class with any of
`bind(tasks, seed)`, `next_tasks(n)`, `keep(group)`, `update(groups)`, `state_dict()` and
`load_state_dict(state)`. What it leaves out, the core supplies: shuffled epochs, every group kept.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.core.calls import Call
from rlx.core.errors import ComponentError, RlxError, UsageError
from rlx.core.mixture import MixedStream, TaskMixture
from rlx.core.rollouts import Group, Task
from rlx.core.task_stream import TaskStream

if TYPE_CHECKING:
    from rlx.core.references import Bound

__all__ = ["MAX_OVERSAMPLE", "BoundSampler", "Drop", "TaskStream", "oversample_error"]

MAX_OVERSAMPLE = 10.0
"""Groups generated per group kept, where the component names no `max_oversample`."""


@dataclass(frozen=True, slots=True)
class Drop:
    """A group that is not trained on, and why."""

    reason: str
    """A few constant words ("all rewards equal"): groups are counted by reason."""


class BoundSampler:
    """A sampler component over the tasks of a run.

    Args:
        bound: the resolved component, function or class form.
        tasks: a `Sequence[Task]`; one that has `max_prompt_tokens` set may hold longer prompts,
            which are passed over and counted here.
        seed: of the run; the same seed gives the same tasks in the same order.
        shuffle: `data.shuffle`, for components that have no `next_tasks` of their own.
    """

    def __init__(
        self, bound: Bound, tasks: Sequence[Task], seed: int, *, shuffle: bool = True
    ) -> None:
        self.name = bound.name
        self.skipped_too_long = 0
        self._bound = bound
        self._limit: int | None = getattr(tasks, "max_prompt_tokens", None)
        self._task_count = len(tasks)
        mixed = isinstance(tasks, TaskMixture) and tasks.probabilities is not None
        stream: Any = MixedStream if mixed else TaskStream
        self._stream: TaskStream | MixedStream = stream(tasks, seed, shuffle=shuffle)
        self._kept: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._reasons: Counter[str] = Counter()
        is_function = inspect.isroutine(bound.instance)
        self._own_next = None if is_function else self._method("next_tasks")
        self._own_update = None if is_function else self._method("update")
        self._own_keep: Callable[[Group], Any] | None = bound
        if not is_function:
            self._own_keep = self._method("keep") or (bound if callable(bound.instance) else None)
        if not is_function and (bind := self._method("bind")) is not None:
            self._call("bind", bind, tasks, seed)

    @property
    def max_oversample(self) -> float:
        """Most groups that may be generated per group that is kept, ≥ 1."""
        own = getattr(self._bound.instance, "max_oversample", None)
        if own is None:
            own = self._bound.tags.extra.get("max_oversample", MAX_OVERSAMPLE)
        return max(1.0, float(own))

    def next_tasks(self, n: int) -> list[Task]:
        """The next n tasks to try.

        Raises ComponentError when the component gives something other than tasks, and UsageError
        when as many prompts in a row as there are tasks were too long.
        """
        chosen: list[Task] = []
        passed = 0
        while len(chosen) < n:
            drawn = self._draw(n - len(chosen))
            fitting = [task for task in drawn if self._fits(task)]
            passed = 0 if fitting else passed + len(drawn)
            self.skipped_too_long += len(drawn) - len(fitting)
            if passed >= max(self._task_count, n):
                raise UsageError(
                    f"sampler {self.name!r} gave {passed} prompts one after the other that are "
                    f"longer than the {self._limit} tokens that fit",
                    where="data.max_prompt_tokens",
                    fix="a larger rollout.context_length, fewer max_new_tokens, shorter prompts",
                )
            chosen += fitting
        return chosen

    def keep(self, group: Group) -> Drop | None:
        """Judge a finished group: None keeps it. Each group is judged once."""
        answer = self._call("keep", self._own_keep, group) if self._own_keep else True
        if isinstance(answer, (bool, np.bool_)):
            verdict = None if answer else Drop("dropped")
        elif isinstance(answer, Drop):
            verdict = answer
        else:
            raise ComponentError(
                f"sampler {self.name!r} answered {answer!r} for a group: keep() returns True, "
                "False or Drop(reason)"
            )
        source = group.task.source
        if verdict is None:
            self._kept[source] += 1
            return None
        self._dropped[source] += 1
        self._reasons[verdict.reason] += 1
        return verdict

    def update(self, groups: Sequence[Group]) -> None:
        """Show the component finished groups, kept and dropped ones alike.

        They are ordered by id, so that what it learns does not depend on which finished first.
        """
        if self._own_update is not None:
            self._call("update", self._own_update, sorted(groups, key=lambda group: group.id))

    def metrics(self) -> dict[str, float]:
        """Counts since the last call: kept, dropped, and the share kept by source."""
        kept, dropped = self._kept, self._dropped
        found = {
            "sampler/kept": float(kept.total()),
            "sampler/dropped": float(dropped.total()),
        }
        for source in sorted({*kept, *dropped}):
            found[f"sampler/pass_rate/{source}"] = kept[source] / (kept[source] + dropped[source])
        if self._limit is not None:
            found["sampler/skipped_too_long"] = float(self.skipped_too_long)
        self._kept, self._dropped, self._reasons = Counter(), Counter(), Counter()
        return found

    @property
    def drop_reasons(self) -> Mapping[str, int]:
        """Groups dropped since the last `metrics()`, by reason."""
        return dict(self._reasons)

    def state_dict(self) -> dict[str, Any]:
        return {
            "stream": self._stream.state_dict(),
            "component": self._bound.state_dict(),
            "skipped_too_long": self.skipped_too_long,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; raises UsageError when the data has changed."""
        self._stream.load_state_dict(state["stream"])
        self._bound.load_state_dict(state["component"])
        self.skipped_too_long = int(state["skipped_too_long"])

    def _draw(self, n: int) -> list[Task]:
        if self._own_next is None:
            return self._stream.next(n)
        own = self._own_next
        drawn = self._call("next_tasks", lambda: list(own(n)))  # it may be a generator
        if not drawn or len(drawn) > n or not all(isinstance(task, Task) for task in drawn):
            raise ComponentError(
                f"sampler {self.name!r}: next_tasks({n}) gave {len(drawn)} items of "
                f"{sorted({type(task).__name__ for task in drawn})}; wanted: 1 to {n} tasks"
            )
        return drawn

    def _fits(self, task: Task) -> bool:
        return self._limit is None or len(task.tokens) <= self._limit

    def _method(self, name: str) -> Callable[..., Any] | None:
        found = getattr(self._bound.instance, name, None)
        return found if callable(found) else None

    def _call(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            with Call(f"sampler {self.name!r} in {what}()"):
                return function(*args)
        except RlxError:
            raise
        except Exception as error:
            raise ComponentError(
                f"sampler {self.name!r} failed in {what}: {type(error).__name__}: {error}"
            ) from error


def oversample_error(
    sampler: BoundSampler, *, wanted: int, dispatched: int, accepted: int
) -> UsageError:
    """The error for a batch that can't be filled within the cap on over-sampling.

    Args:
        wanted: groups per batch.
        dispatched: groups tried for it.
        accepted: those among them that the sampler kept.
    """
    reasons = sorted(sampler.drop_reasons.items(), key=lambda item: (-item[1], item[0]))
    listing = "; ".join(f"{count} dropped: {reason}" for reason, count in reasons)
    because = f" ({listing})" if listing else ""
    return UsageError(
        f"sampler {sampler.name!r} kept {accepted} of {dispatched} groups, a pass rate of "
        f"{accepted / max(1, dispatched):.1%}, where a batch needs {wanted}{because}; "
        f"the cap is {sampler.max_oversample:g} groups tried per group needed",
        where="sampler.max_oversample",
        fix="tasks that the model solves sometimes but not always, a larger rollout.group_size or "
        "rollout.temperature, a more lenient sampler, or a larger sampler.max_oversample",
    )
