"""Workers in the driver's own process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rlx.core.engine.depot import LocalDepot
from rlx.core.engine.kept_memory import KEPT_MEMORY, keep_memory
from rlx.core.engine.memory import MemoryUse
from rlx.core.engine.runtime import WorkerSpec, neighbour
from rlx.core.engine.stacks import Suspect
from rlx.core.engine.worker_host import WorkerHost


class InlineWorker:
    """A worker in the driver's process: `breakpoint()` in a reward or a loss just works."""

    def __init__(self, name: str, host: WorkerHost) -> None:
        self.name = name
        self.host = host

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await self.host.call(self.name, method, args, kwargs)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        async for item in self.host.stream(self.name, method, args):
            yield item

    async def now(self, method: str, *args: Any) -> Any:
        return self.host.now(self.name, method, args)

    async def memory(self) -> MemoryUse:
        return await self.host.memory()

    def close(self) -> None:
        self.host.close()


class InlineRuntime:
    def __init__(self) -> None:
        self.depot = LocalDepot()
        self._workers: list[InlineWorker] = []

    async def seat(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        return list(specs)

    async def start(self, spec: WorkerSpec) -> InlineWorker:
        os.environ.update(spec.env)
        if KEPT_MEMORY.items() <= spec.env.items():
            keep_memory()  # glibc has read its variables long since
        beside = neighbour(self._workers, spec)
        host = beside.host if beside else WorkerHost(spec.name)
        await host.construct(spec)
        worker = InlineWorker(spec.name, host)
        self._workers.append(worker)
        return worker

    async def end(self, worker: InlineWorker) -> None:
        """Forget the worker; a thread that hangs in it can't be ended, only left behind."""
        worker.close()
        self._workers.remove(worker)

    async def end_all(self) -> None:
        for worker in reversed(self._workers):
            worker.close()
        self._workers.clear()

    def suspects(self) -> list[Suspect]:
        return []

    async def write_stacks(self, about: str) -> str:
        return ""

    async def close(self) -> None:
        await self.end_all()
