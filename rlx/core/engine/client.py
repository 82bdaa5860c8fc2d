"""The driver's side of a rollout engine: many small requests in, few worker calls out.

Requests made in the same turn of the event loop go to the engine in one call, in their order.
That keeps the number of remote calls low, and it makes a synchronous run repeatable:
the engine adds all requests of a call before it steps, so its batches do not depend on timing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rlx.core.engine.interfaces import (
    GenerateRequest,
    Generation,
    PublishReport,
    Sampling,
    WeightsFile,
)
from rlx.core.engine.runtime import Worker
from rlx.core.errors import EngineError


class RolloutClient:
    """Asynchronous `generate` over one engine worker.

    Args:
        swaps_in_flight: new weights are taken between two tokens of running requests; else the
            engine first ends what it was asked for, and new requests wait.
    """

    def __init__(self, worker: Worker, *, swaps_in_flight: bool = False) -> None:
        self._worker = worker
        self._swaps_in_flight = swaps_in_flight
        self._held = False
        self._idle = _IdleClock()
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
        if not self._pending and not self._held:
            # Two turns later every episode that was ready by now has made its request.
            loop.call_soon(loop.call_soon, self._flush)
        self._pending.append((request, future))
        return await future

    def _flush(self) -> None:
        if self._held or not self._pending:
            return
        batch, self._pending = self._pending, []
        self._idle.add(len(batch))
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _run(self, batch: list[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        waiting = {request.id: future for request, future in batch}
        try:
            async for generations in self._worker.stream("generate", [item for item, _ in batch]):
                for generation in generations:
                    future = waiting.pop(generation.request_id)
                    self._idle.add(-1)
                    if not future.done():
                        future.set_result(generation)
        except Exception as error:
            self._idle.add(-len(waiting))
            _fail(waiting, error)
        except BaseException:
            self._idle.add(-len(waiting))
            for future in waiting.values():
                future.cancel()
            raise
        if waiting:
            self._idle.add(-len(waiting))
            _fail(waiting, EngineError(f"the engine left {len(waiting)} requests unanswered"))

    async def abort(self) -> None:
        """End every running request."""
        for task in list(self._batches):
            task.cancel()
        await self._worker.call("abort")

    async def load_weights(self, weights: WeightsFile) -> PublishReport:
        """Replace the weights; requests wait meanwhile unless they are swapped in flight."""
        if self._swaps_in_flight:
            return await self._worker.call("load_weights", weights)
        async with self._quiet():
            return await self._worker.call("load_weights", weights)

    @asynccontextmanager
    async def _quiet(self) -> AsyncIterator[None]:
        """Nothing runs on the engine; new requests wait."""
        self._held = True
        try:
            while self._batches:
                await asyncio.wait(self._batches)
            yield
        finally:
            self._held = False
            self._flush()

    def take_idle_share(self) -> float:
        """Share of the time since the last call in which the engine had no request, 0 … 1."""
        return self._idle.take()

    async def sleep(self, level: int) -> None:
        """Have the engine give up device memory until the next `load_weights`."""
        await self._worker.call("sleep", level)

    async def forget(self) -> None:
        """Have the engine drop every cached prefix."""
        await self._worker.call("forget")

    async def stop(self) -> None:
        await self._worker.call("stop")


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


def _fail(waiting: dict[int, Any], error: Exception) -> None:
    for future in waiting.values():
        if not future.done():
            future.set_exception(error)
    waiting.clear()
