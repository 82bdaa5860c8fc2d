"""One call of one reward component: threads, time-out, retries, checks, errors worth reading."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlx.core.engine.interfaces import RewardReply
from rlx.core.errors import UsageError
from rlx.core.references import Bound
from rlx.core.rewards import RewardInputs, as_reward, excerpt
from rlx.core.threads import CallTimeoutError, DaemonThreads, within

_LONGEST_WAIT = 30.0
"""Seconds between two attempts, at most."""
_CORE = str(Path(__file__).parents[1])


class RewardCall:
    """A bound reward with everything around it. `scope` decides what one call is given."""

    def __init__(
        self,
        bound: Bound,
        *,
        threads: DaemonThreads,
        timeout: float,
        retries: int,
        backoff: float,
    ) -> None:
        self.bound = bound
        self._threads = threads
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._is_async = is_async(bound.instance)

    def split(self, samples: Sequence[RewardInputs]) -> list[list[int]]:
        """Return the positions of the samples of each call."""
        if self.bound.tags.scope == "rollout":
            return [[i] for i in range(len(samples))]
        if self.bound.tags.scope == "batch":
            return [list(range(len(samples)))] if samples else []
        groups: dict[int, list[int]] = {}
        for i, sample in enumerate(samples):
            groups.setdefault(sample.group_id, []).append(i)
        return list(groups.values())

    async def reply(self, samples: Sequence[RewardInputs]) -> list[RewardReply]:
        """Make one call; never raises for what a component does, one reply per sample."""
        if self.bound.tags.needs_label:
            for sample in samples:
                if sample.label is None:
                    return self._failed(samples, "needs a label, and the task has none", sample)
        try:
            value = await self._attempts(
                samples[0] if self.bound.tags.scope == "rollout" else list(samples)
            )
        except CallTimeoutError:
            return self._failed(samples, f"did not return within {self._timeout:g} s", samples[0])
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self._failed(samples, _raised(error), samples[0], error)
        except (Exception, SystemExit) as error:
            return self._failed(samples, _raised(error), samples[0], error)
        if self.bound.tags.scope == "rollout":
            return [self._checked(value, samples[0])]
        return self._checked_list(value, samples)

    async def _attempts(self, argument: Any) -> Any:
        """Call until it returns; a time-out is not retried, it would cost as long again, nor is a
        mistake in the configuration, which stays one."""
        for attempt in range(self._retries + 1):
            try:
                return await self._once(argument)
            except (CallTimeoutError, UsageError):
                raise
            except Exception:
                if attempt == self._retries:
                    raise
                await asyncio.sleep(min(self._backoff * 2**attempt, _LONGEST_WAIT))
        raise AssertionError("unreachable")

    async def _once(self, argument: Any) -> Any:
        if self._is_async:
            # An async function that blocks instead of awaiting can't be interrupted, only slow.
            return await within(self._timeout, self.bound(argument))
        value = await self._threads.run(self.bound, argument, timeout=self._timeout)
        if inspect.isawaitable(value):  # `lambda sample: an_async_function(sample)`
            return await within(self._timeout, value)
        return value

    def _checked(self, value: Any, sample: RewardInputs) -> RewardReply:
        try:
            reward = as_reward(value)
        except Exception as error:
            if error is value:  # one sample of several that the component could not score
                return self._failed([sample], f"failed: {excerpt(str(error))}", sample, error)[0]
            return self._failed([sample], f"returned no valid reward: {error}", sample)[0]
        return RewardReply(
            score=reward.score, parts=reward.parts, metrics=reward.metrics, note=reward.note
        )

    def _checked_list(self, value: Any, samples: Sequence[RewardInputs]) -> list[RewardReply]:
        values = value.tolist() if callable(getattr(value, "tolist", None)) else value
        if not isinstance(values, (list, tuple)) or len(values) != len(samples):
            found = f"{len(values)} values" if isinstance(values, (list, tuple)) else repr(value)
            what = (
                f"has scope={self.bound.tags.scope!r}, so it returns a list with one reward for "
                f"each of the {len(samples)} samples; it returned {excerpt(found, 120)}"
            )
            return self._failed(samples, what, samples[0])
        return [self._checked(v, sample) for v, sample in zip(values, samples, strict=True)]

    def _failed(
        self,
        samples: Sequence[RewardInputs],
        what: str,
        at: RewardInputs,
        error: BaseException | None = None,
    ) -> list[RewardReply]:
        text = f"reward {self.bound.name!r} {what}\n{at.describe()}"
        if error is not None:
            text += f"\n{user_traceback(error)}"
        return [RewardReply(score=None, error=text) for _ in samples]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling a function or an instance gives a coroutine."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - not a test for callability
    )


def user_traceback(error: BaseException) -> str:
    """Return the traceback without the frames of rlx's core that led to the user's function."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        if not trace.tb_frame.f_code.co_filename.startswith((_CORE, asyncio.__path__[0])):
            break
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace)).rstrip()


def _raised(error: BaseException) -> str:
    return f"raised {type(error).__name__}: {excerpt(str(error))}"
