"""Where worker objects live in a process: one thread for their synchronous methods.

CUDA contexts, OpenMP settings and process groups are per thread.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rlx.core.engine.depot import unpacked
from rlx.core.engine.memory import MemoryUse, take_memory
from rlx.core.engine.pulse import beat
from rlx.core.engine.runtime import WorkerSpec


class WorkerHost:
    """Holds worker objects by name: constructs them, runs their methods on its one thread."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._objects: dict[str, Any] = {}

    async def construct(self, spec: WorkerSpec) -> None:
        def make() -> Any:
            if spec.hooks is not None:
                spec.hooks.run(spec.role, spec.rank, spec.world)
            module, _, name = spec.target.partition(":")
            return getattr(importlib.import_module(module), name)(**spec.kwargs)

        loop = asyncio.get_running_loop()
        self._objects[spec.name] = await loop.run_in_executor(self._thread, make)

    async def call(
        self, worker: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        function = getattr(self._objects[worker], method)
        if inspect.iscoroutinefunction(function):
            return await function(*args, **kwargs)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(
                self._thread, lambda: function(*map(unpacked, args), **kwargs)
            )
        finally:
            beat()

    def stream(self, worker: str, method: str, args: Sequence[Any]) -> AsyncIterator[Any]:
        return getattr(self._objects[worker], method)(*args)

    def now(self, worker: str, method: str, args: Sequence[Any]) -> Any:
        return getattr(self._objects[worker], method)(*args)

    async def memory(self) -> MemoryUse:
        return take_memory()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
