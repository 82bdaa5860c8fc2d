"""The driver's side of a rollout engine: many small requests in, few worker calls out.

Requests made in the same turn of the event loop go to the engine in one call, in their order.
That keeps the number of remote calls low, and it makes a synchronous run repeatable:
the engine adds all requests of a call before it steps, so its batches do not depend on timing.

Where the engine's process is lost, a new one gets the weights that were published last, and the
requests that had no answer, which bring their own seeds. Who asked for them notices nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

from rlx.core.engine.interfaces import (
    GenerateRequest,
    Generation,
    PublishReport,
    Sampling,
    WeightsUpdate,
)
from rlx.core.engine.rollout.stats import EngineStats
from rlx.core.engine.runtime import Worker
from rlx.core.engine.trace import BusyClock
from rlx.core.errors import EngineError, WorkerLostError

Renew: TypeAlias = Callable[[WorkerLostError], Awaitable[Worker]]
"""Ends what is left of the engine's worker and returns a started new one, or raises."""


class RolloutClient:
    """Asynchronous `generate` over one engine worker.

    Args:
        swaps_in_flight: new weights are taken between two tokens of running requests; else the
            engine first ends what it was asked for, and new requests wait.
        renew: how to get a new engine for one that is lost; None: that fails what was asked for.
    """

    def __init__(
        self, worker: Worker, *, swaps_in_flight: bool = False, renew: Renew | None = None
    ) -> None:
        self._worker = worker
        self._swaps_in_flight = swaps_in_flight
        self._renew = renew
        self._renewing = asyncio.Lock()
        self._weights: WeightsUpdate | None = None
        """Published last; None: the engine has those that it started with."""
        self._holds = 0
        self._idle = _IdleClock()
        self._busy: BusyClock | None = None
        self._ids = itertools.count()
        self._pending: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._batches: set[asyncio.Task[None]] = set()

    @property
    def load(self) -> int:
        """Requests that run or wait."""
        return len(self._pending) + self._idle.running

    async def generate(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Generation:
        """Sample one continuation of `prompt`; raises `EngineError` when the engine failed."""
        loop = asyncio.get_running_loop()
        request = GenerateRequest(id=next(self._ids), prompt=prompt, sampling=sampling, seed=seed)
        future: asyncio.Future[Generation] = loop.create_future()
        if not self._pending and not self._holds:
            # Two turns later every episode that was ready by now has made its request.
            loop.call_soon(loop.call_soon, self._flush)
        self._pending.append((request, future))
        return await future

    def _flush(self) -> None:
        if self._holds or not self._pending:
            return
        batch, self._pending = self._pending, []
        self._count(len(batch))
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _run(self, batch: list[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        waiting = {request.id: future for request, future in batch}
        worker = self._worker
        try:
            async for generations in worker.stream("generate", [item for item, _ in batch]):
                for generation in generations:
                    future = waiting.pop(generation.request_id)
                    self._count(-1)
                    if not future.done():
                        future.set_result(generation)
            if waiting:
                raise EngineError(f"the engine left {len(waiting)} requests unanswered")
        except WorkerLostError as error:
            self._count(-len(waiting))
            await self._ask_again(
                [(item, future) for item, future in batch if item.id in waiting], worker, error
            )
        except Exception as error:
            self._count(-len(waiting))
            _fail(waiting.values(), error)
        except BaseException:
            self._count(-len(waiting))
            for future in waiting.values():
                future.cancel()
            raise

    async def _ask_again(
        self,
        unanswered: list[tuple[GenerateRequest, asyncio.Future[Generation]]],
        lost: Worker,
        error: WorkerLostError,
    ) -> None:
        """Make these requests of a new engine, before all others."""
        if all(future.done() for _, future in unanswered):
            return  # who asked has given up; the engine is replaced when it is needed
        try:
            await self._replace(lost, error)
        except Exception as failure:
            _fail((future for _, future in unanswered), failure)
            return
        wanted = [(item, future) for item, future in unanswered if not future.done()]
        self._pending = [*wanted, *self._pending]
        self._flush()

    async def _replace(self, lost: Worker, error: WorkerLostError) -> PublishReport | None:
        """Put a new engine with the weights published last in the place of `lost`, unless another
        call has; returns what it says of those weights.

        Raises:
            WorkerLostError: there is no getting those weights again.
        """
        if self._renew is None:
            raise error
        self._holds += 1
        try:
            async with self._renewing:
                if self._worker is not lost:
                    return None
                if self._weights is not None and self._weights.link.keeps_nothing:
                    raise _beyond_help(error, f"'{self._weights.link.transport}' keeps no weights")
                while True:
                    worker = await self._renew(WorkerLostError(lost.name, error.what))
                    try:
                        report = (
                            await worker.call("load_weights", self._weights)
                            if self._weights
                            else None
                        )
                    except WorkerLostError as again:
                        error = again
                        continue
                    except EngineError as failure:
                        raise _beyond_help(error, str(failure)) from failure
                    self._worker = worker
                    return report
        finally:
            self._holds -= 1
            self._flush()

    async def _call(self, method: str) -> None:
        """Call the engine; a new one has nothing to be told."""
        worker = self._worker
        try:
            await worker.call(method)
        except WorkerLostError as error:
            await self._replace(worker, error)

    def _count(self, more: int) -> None:
        self._idle.add(more)
        if self._busy is not None:
            self._busy.add(more)

    def watch(self, clock: BusyClock) -> None:
        """Tell `clock` of every request from now on."""
        self._busy = clock

    async def abort(self) -> None:
        """End every running request."""
        for task in list(self._batches):
            task.cancel()
        # One that is lost has no request to end, and is replaced when it is needed.
        with contextlib.suppress(WorkerLostError):
            await self._worker.call("abort")

    async def load_weights(self, weights: WeightsUpdate) -> PublishReport:
        """Replace the weights; requests wait meanwhile unless they are swapped in flight.

        The learner keeps them until the next ones come, for an engine that is started anew.
        """
        if self._swaps_in_flight:
            return await self._load(weights)
        async with self._quiet():
            return await self._load(weights)

    async def _load(self, weights: WeightsUpdate) -> PublishReport:
        self._weights = weights
        while True:
            worker = self._worker
            try:
                return await worker.call("load_weights", weights)
            except WorkerLostError as error:
                if (report := await self._replace(worker, error)) is not None:
                    return report

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Nothing runs on the engine; new requests wait."""
        self._holds += 1
        try:
            while self._batches:
                await asyncio.wait(self._batches)
            yield
        finally:
            self._holds -= 1
            self._flush()

    def take_idle_share(self) -> float:
        """Share of the time since the last call in which the engine had no request, 0 … 1."""
        return self._idle.take()

    async def sleep(self, level: int) -> None:
        """Have the engine give up device memory until the next `load_weights`."""
        with contextlib.suppress(WorkerLostError):  # one that is lost holds none
            await self._worker.call("sleep", level)

    async def take_stats(self) -> EngineStats:
        """What the engine did since the last call."""
        return await self._worker.call("take_stats")

    async def forget(self) -> None:
        """Have the engine drop every cached prefix."""
        await self._call("forget")

    async def stop(self) -> None:
        await self._worker.call("stop")


def _beyond_help(lost: WorkerLostError, why: str) -> WorkerLostError:
    """An engine that only a new start of everything can replace."""
    what = f"{lost.what}; a new one can't have the weights published last: {why}"
    return WorkerLostError(lost.worker, what, hung=lost.hung)


class _IdleClock:
    """How long nothing ran."""

    def __init__(self) -> None:
        self.running = 0
        self._idle = 0.0
        self._since = self._start = time.perf_counter()

    def add(self, count: int) -> None:
        self._pass()
        self.running += count

    def take(self) -> float:
        self._pass()
        idle, whole = self._idle, self._since - self._start
        self._idle, self._start = 0.0, self._since
        return idle / whole if whole > 0 else 0.0

    def _pass(self) -> None:
        now = time.perf_counter()
        if not self.running:
            self._idle += now - self._since
        self._since = now


def _fail(waiting: Iterable[asyncio.Future[Generation]], error: Exception) -> None:
    for future in waiting:
        if not future.done():
            future.set_exception(error)
