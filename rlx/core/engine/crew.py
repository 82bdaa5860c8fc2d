"""The workers of a run: where they live, how they start, how they end."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlx.core.config import RunConfig
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.runtime import (
    InlineRuntime,
    RayRuntime,
    Runtime,
    Worker,
    WorkerHooks,
    WorkerSpec,
)
from rlx.core.plugins import PluginSystem
from rlx.core.references import ComponentRef
from rlx.core.shipping import shipped_modules


class Selected(Protocol):
    """The components of a run."""

    @property
    def rewards(self) -> tuple[tuple[ComponentRef, float], ...]: ...

    def shipped_modules(self) -> list[str]:
        """Files and packages that only the driver has."""
        ...


class Crew:
    """Starts workers side by side under Ray, one after the other in one process.

    Args:
        plugins: whose `rlx_on_worker_start` every worker calls.
        folder: of the run; what Ray's workers print goes to its `logs/`.
        status: told what is being waited for.
    """

    def __init__(
        self,
        config: RunConfig,
        selection: Selected,
        *,
        plugins: PluginSystem,
        folder: Path,
        status: Callable[[str], None],
    ) -> None:
        self._config = config
        self._selection = selection
        self._logs = folder / "logs"
        self._hooks = WorkerHooks(refs=plugins.worker_hooks(), run_folder=str(folder))
        self._status = status
        self._runtime: Runtime | None = None
        self._specs: dict[str, WorkerSpec] = {}
        self.facts: dict[str, Any] = {}
        """What each worker said of itself when it started."""

    async def start(self, specs: Sequence[WorkerSpec]) -> dict[str, Worker]:
        """Start all workers and return them by name."""
        specs = [dataclasses.replace(spec, hooks=self._hooks) for spec in specs]
        self._runtime = runtime = await self._open_runtime(len(specs))
        specs = await runtime.seat(specs)
        self._specs = {spec.name: spec for spec in specs}
        waiting = {spec.name for spec in specs}

        async def start(spec: WorkerSpec) -> Worker:
            worker = await runtime.start(spec)
            self.facts[spec.name] = await worker.call("start")
            waiting.discard(spec.name)
            if waiting:
                self._status("starting " + ", ".join(sorted(waiting)))
            return worker

        self._status("starting " + ", ".join(sorted(waiting)))
        if isinstance(runtime, InlineRuntime):
            started = [await start(spec) for spec in specs]
        else:
            # Who shares a process starts after its neighbour, in the same order on every rank.
            hosts = [spec for spec in specs if spec.beside is None]
            guests = [spec for spec in specs if spec.beside is not None]
            started = await asyncio.gather(*(start(spec) for spec in hosts))
            started += await asyncio.gather(*(start(spec) for spec in guests))
        return {worker.name: worker for worker in started}

    def settled(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """The specs as they were started, with what their place added."""
        return [self._specs[spec.name] for spec in specs]

    def reward_runner(
        self, specs: Sequence[WorkerSpec], started: Mapping[str, Worker]
    ) -> RewardRunner:
        """The rewards, with new workers for those that hang or die."""
        running = [started[spec.name] for spec in specs]

        async def replace(number: int) -> Worker:
            assert self._runtime is not None
            await self._runtime.end(running[number])
            running[number] = await self._runtime.start(self._specs[specs[number].name])
            await running[number].call("start")
            return running[number]

        return RewardRunner(
            list(running), self._selection.rewards, self._config.reward, replace=replace
        )

    async def close(self) -> None:
        """End every worker."""
        if self._runtime is not None:
            await self._runtime.close()

    def _shipped_hooks(self) -> list[str]:
        return [str(path) for path in shipped_modules(self._hooks.refs)]

    async def _open_runtime(self, count: int) -> Runtime:
        if self._config.runtime.kind == "inline":
            return InlineRuntime()
        self._status("starting Ray")
        runtime = RayRuntime(
            self._config.runtime,
            logs=self._logs,
            workers=count,
            placement=self._config.placement,
            modules=sorted({*self._selection.shipped_modules(), *self._shipped_hooks()}),
        )
        await asyncio.to_thread(runtime.connect)
        return runtime
