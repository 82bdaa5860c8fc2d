"""Rewards on the driver's side: spread rollouts over workers, compose what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rlx.core.config import RewardPolicy
from rlx.core.engine.interfaces import RewardReply
from rlx.core.engine.reward_compose import Composed, RewardComposer
from rlx.core.engine.reward_worker import RewardWorker
from rlx.core.engine.trace import BusyClock
from rlx.core.errors import ClusterLostError, ComponentError, EngineError, WorkerLostError
from rlx.core.references import ComponentRef
from rlx.core.rewards import RewardInputs, reward_inputs_of
from rlx.core.rollouts import Rollout

__all__ = ["Handle", "Replace", "RewardRunner", "RewardWorker"]


class Handle(Protocol):
    """A worker in whichever process it lives."""

    async def call(self, method: str, *args: Any) -> Any: ...


Replace = Callable[[int, str], Awaitable[Handle]]
"""Ends worker number i, if it still can be ended, and returns a started new one; told why."""


class RewardRunner:
    """The driver's side: spreads rollouts over the workers, composes what comes back.

    Args:
        workers: handles on started `RewardWorker`s.
        rewards: components with their weights, as the workers have them.
        replace: how to get a new worker for one that hangs or died; None: that ends the run.
    """

    def __init__(
        self,
        workers: Sequence[Handle],
        rewards: Sequence[tuple[ComponentRef, float]],
        policy: RewardPolicy,
        *,
        replace: Replace | None = None,
    ) -> None:
        self._workers = list(workers)
        self._locks = [asyncio.Lock() for _ in workers]
        self._composer = RewardComposer(rewards, policy)
        self._policy = policy
        self._replace = replace
        self._waiting: list[_Waiting] = []
        self._running: set[asyncio.Task[None]] = set()
        self._next = 0
        self._busy: BusyClock | None = None
        self._counts: Counter[str] = Counter()
        self._stateful = any(hasattr(ref.load(), "state_dict") for ref, _ in rewards)
        self._remembered: list[Mapping[str, Any]] = [{} for _ in workers]

    @property
    def weights(self) -> Mapping[str, float]:
        """Weight of each part, by the name that it has in `Rollout.parts`."""
        return self._composer.weights

    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Rollout] | None:
        """Return the rollouts of one group with `reward`, `parts` and `metrics` filled in.

        None: a reward failed and the policy is `drop_group`.

        Raises:
            ComponentError: a reward failed under the policy `raise`; the message has the reward's
                name, the sample and the traceback.
            EngineError: a worker died and there is no `replace`.
        """
        if not self._composer.names:
            return list(rollouts)
        samples = [reward_inputs_of(rollout) for rollout in rollouts]
        with self._counted():
            table = await self._submit(samples)
        composed = [
            self._composer.compose(sample, replies)
            for sample, replies in zip(samples, table, strict=True)
        ]
        errors = [error for one in composed for error in one.errors]
        self._counts["reward/failed"] += len(errors)
        if errors and self._policy.failure == "raise":
            more = f"\n({len(errors) - 1} more in this group)" if len(errors) > 1 else ""
            raise ComponentError(errors[0] + more)
        if errors and self._policy.failure == "drop_group":
            self._counts["reward/dropped_groups"] += 1
            return None
        return [_rewarded(rollout, one) for rollout, one in zip(rollouts, composed, strict=True)]

    def watch(self, clock: BusyClock) -> None:
        """Tell `clock` of every group that is scored from now on."""
        self._busy = clock

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if self._busy is not None:
            self._busy.add(1)
        try:
            yield
        finally:
            if self._busy is not None:
                self._busy.add(-1)

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        names = ["reward/failed"]
        if self._policy.failure == "drop_group":
            names.append("reward/dropped_groups")
        if self._replace is not None:
            names.append("reward/workers_replaced")
        metrics = {name: float(self._counts[name]) for name in names}
        self._counts.clear()
        return metrics

    async def state_dict(self) -> dict[str, Any]:
        """State of the components in each worker, and whose turn is next.

        Empty when no component keeps any. Of a worker that died, the state that it had last.
        """
        if not self._stateful:
            return {}
        for index, worker in enumerate(self._workers):
            with contextlib.suppress(EngineError):
                self._remembered[index] = await worker.call("state_dict")
        return {"next": self._next, "workers": list(self._remembered)}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; further workers start like the first one."""
        if not state:
            return
        self._next = state["next"] % len(self._workers)
        saved = state["workers"]
        for index, worker in enumerate(self._workers):
            self._remembered[index] = saved[index] if index < len(saved) else saved[0]
            try:
                await worker.call("load_state_dict", self._remembered[index])
            except EngineError as error:
                if self._replace is None:
                    raise
                await self._renew(index, worker, _loss(error))

    async def close(self) -> None:
        """Give up what is still running."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _submit(self, samples: list[RewardInputs]) -> list[list[RewardReply]]:
        """Groups that arrive within one tick of the loop travel in one call per worker."""
        loop = asyncio.get_running_loop()
        waiting = _Waiting(samples, loop.create_future())
        self._waiting.append(waiting)
        if len(self._waiting) == 1:
            loop.call_soon(self._flush)
        return await waiting.replies

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        count = len(self._workers)
        for offset in range(min(count, len(waiting))):
            index = (self._next + offset) % count
            task = asyncio.ensure_future(self._serve(index, waiting[offset::count]))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
        self._next = (self._next + len(waiting)) % count

    async def _serve(self, index: int, groups: list[_Waiting]) -> None:
        try:
            tables = await self._score(index, [group.samples for group in groups])
        except BaseException as error:
            for group in groups:
                if not group.replies.done():
                    group.replies.set_exception(
                        error if isinstance(error, Exception) else EngineError(repr(error))
                    )
            if not isinstance(error, Exception):
                raise
            return
        for group, table in zip(groups, tables, strict=True):
            if not group.replies.done():
                group.replies.set_result(table)

    async def _score(
        self, index: int, groups: list[list[RewardInputs]], *, again: bool = True
    ) -> list[list[list[RewardReply]]]:
        """Score groups in one call. When the worker dies of it: group by group, each on a worker
        that is alive at its start, so that only the group that kills workers fails."""
        worker = self._workers[index]
        try:
            samples = [sample for group in groups for sample in group]
            flat = await worker.call("score", samples)
        except EngineError as error:
            if self._replace is None:
                raise
            await self._renew(index, worker, _loss(error))
            if len(groups) > 1:
                return [table for g in groups for table in await self._score(index, [g])]
            if again:  # it may have been another call that killed the worker
                return await self._score(index, groups, again=False)
            return [[self._dead(sample, error) for sample in groups[0]]]
        if self._replace is not None and any(reply.error for row in flat for reply in row):
            await self._renew_if_stuck(index, worker)
        rows = iter(flat)
        return [[next(rows) for _ in group] for group in groups]

    async def _renew_if_stuck(self, index: int, worker: Handle) -> None:
        try:
            stuck = await worker.call("stuck")
        except EngineError as error:  # it was lost after it had answered
            await self._renew(index, worker, _loss(error))
            return
        if stuck >= self._policy.concurrency:
            await self._renew(index, worker, f"is full: {stuck} calls of rewards in it hang")

    async def _renew(self, index: int, dead: Handle, why: str) -> None:
        assert self._replace is not None
        async with self._locks[index]:
            if self._workers[index] is dead:  # else a concurrent call did it already
                self._workers[index] = await self._replace(index, why)
                if self._remembered[index]:
                    await self._workers[index].call("load_state_dict", self._remembered[index])
                self._counts["reward/workers_replaced"] += 1

    def _dead(self, sample: RewardInputs, error: EngineError) -> list[RewardReply]:
        names = ", ".join(self._composer.names)
        text = f"the worker that ran the rewards {names} died twice of this group: {error}\n"
        return [
            RewardReply(score=None, error=text + sample.describe()) for _ in self._composer.names
        ]


@dataclasses.dataclass(slots=True)
class _Waiting:
    """The samples of one group, and where their replies are wanted."""

    samples: list[RewardInputs]
    replies: asyncio.Future[list[list[RewardReply]]]


def _loss(error: EngineError) -> str:
    """What became of a worker, to be said after its name; raises where none can replace it."""
    if isinstance(error, ClusterLostError):
        raise error
    return error.what if isinstance(error, WorkerLostError) else str(error)


def _rewarded(rollout: Rollout, composed: Composed) -> Rollout:
    return dataclasses.replace(
        rollout,
        reward=composed.reward,
        parts=composed.parts,
        notes=composed.notes,
        metrics={**rollout.metrics, **composed.metrics},
    )
