"""The driver's side of a rollout engine: many small requests in, few worker calls out.

Requests made in the same turn of the event loop go to the engine in one call, in their order.
That keeps the number of remote calls low, and it makes a synchronous run repeatable:
the engine adds all requests of a call before it steps, so its batches do not depend on timing.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
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
    """Asynchronous `generate` over one engine worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._ids = itertools.count()
        self._pending: list[tuple[GenerateRequest, asyncio.Future[Generation]]] = []
        self._batches: set[asyncio.Task[None]] = set()

    async def generate(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Generation:
        """Sample one continuation of `prompt`; raises `EngineError` when the engine failed."""
        loop = asyncio.get_running_loop()
        request = GenerateRequest(id=next(self._ids), prompt=prompt, sampling=sampling, seed=seed)
        future: asyncio.Future[Generation] = loop.create_future()
        if not self._pending:
            # Two turns later every episode that was ready by now has made its request.
            loop.call_soon(loop.call_soon, self._flush)
        self._pending.append((request, future))
        return await future

    def _flush(self) -> None:
        batch, self._pending = self._pending, []
        task = asyncio.get_running_loop().create_task(self._run(batch))
        self._batches.add(task)
        task.add_done_callback(self._batches.discard)

    async def _run(self, batch: list[tuple[GenerateRequest, asyncio.Future[Generation]]]) -> None:
        waiting = {request.id: future for request, future in batch}
        try:
            async for generations in self._worker.stream("generate", [item for item, _ in batch]):
                for generation in generations:
                    future = waiting.pop(generation.request_id)
                    if not future.done():
                        future.set_result(generation)
        except Exception as error:
            _fail(waiting, error)
        except BaseException:
            for future in waiting.values():
                future.cancel()
            raise
        if waiting:
            _fail(waiting, EngineError(f"the engine left {len(waiting)} requests unanswered"))

    async def abort(self) -> None:
        """End every running request."""
        for task in list(self._batches):
            task.cancel()
        await self._worker.call("abort")

    async def load_weights(self, weights: WeightsFile) -> PublishReport:
        return await self._worker.call("load_weights", weights)

    async def forget(self) -> None:
        """Have the engine drop every cached prefix."""
        await self._worker.call("forget")

    async def stop(self) -> None:
        await self._worker.call("stop")


def _fail(waiting: dict[int, Any], error: Exception) -> None:
    for future in waiting.values():
        if not future.done():
            future.set_exception(error)
    waiting.clear()
