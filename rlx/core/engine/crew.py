"""The workers of a run: where they live, how they start, how they end."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rlx.core.config import RunConfig
from rlx.core.engine.client import Renew
from rlx.core.engine.depot import Depot
from rlx.core.engine.fault_ledger import FaultLedger
from rlx.core.engine.inline_runtime import InlineRuntime
from rlx.core.engine.memory import MemoryUse, memory_metrics, take_memory
from rlx.core.engine.object_store import ObjectStore
from rlx.core.engine.ray_nodes import stacks_there
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.runtime import Runtime, Worker, WorkerHooks, WorkerSpec, wait_for_start
from rlx.core.engine.signals import install_again
from rlx.core.engine.stacks import dump_stacks
from rlx.core.errors import EngineError, WorkerLostError
from rlx.core.plugins import PluginSystem
from rlx.core.references import ComponentRef
from rlx.core.shipping import shipped_modules
from rlx.core.threads import DaemonThreads


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
        self._stacks = folder / "stacks"
        self._hooks = WorkerHooks(refs=plugins.worker_hooks(), run_folder=str(folder))
        self._status = status
        self._runtime: Runtime | None = None
        self._specs: dict[str, WorkerSpec] = {}
        self._running: dict[str, Worker] = {}
        self._generation = 0
        """How often all workers were ended; who was to be replaced before is not any more."""
        self._store = ObjectStore()
        self._threads = DaemonThreads("store")
        self.faults = FaultLedger(folder, status)
        self.facts: dict[str, Any] = {}
        """What each worker said of itself when it started."""

    async def start(self, specs: Sequence[WorkerSpec]) -> dict[str, Worker]:
        """Start all workers and return them by name."""
        specs = [dataclasses.replace(spec, hooks=self._hooks) for spec in specs]
        if self._runtime is None:
            self._runtime = await self._open_runtime(len(specs))
        runtime = self._runtime
        specs = await runtime.seat(specs)
        self._specs = {spec.name: spec for spec in specs}
        waiting = {spec.name for spec in specs}

        async def start(spec: WorkerSpec) -> Worker:
            worker = await self._start(runtime, spec)
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

    @property
    def depot(self) -> Depot:
        """How batches get to the workers, once there are any."""
        assert self._runtime is not None
        return self._runtime.depot

    def settled(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """The specs as they were started, with what their place added."""
        return [self._specs[spec.name] for spec in specs]

    async def _start(self, runtime: Runtime, spec: WorkerSpec) -> Worker:
        self._running[spec.name] = worker = await runtime.start(spec)
        limit = None if self._inline else self._config.faults.start_timeout
        work = worker.call("start")
        self.facts[spec.name] = await wait_for_start(runtime, spec.name, work, timeout=limit)
        return worker

    def reward_runner(
        self, specs: Sequence[WorkerSpec], started: Mapping[str, Worker]
    ) -> RewardRunner:
        """The rewards, with new workers for those that hang or die."""
        names = [spec.name for spec in specs]
        renew = self._renewal("reward_restarts", self._config.faults.reward_restarts)

        async def replace(number: int, why: str) -> Worker:
            return await renew(WorkerLostError(names[number], why))

        return RewardRunner(
            [started[name] for name in names],
            self._selection.rewards,
            self._config.reward,
            replace=replace,
        )

    def engine_renewal(self) -> Renew | None:
        """How a rollout engine that is lost is started anew; None: it isn't."""
        limit = self._config.faults.engine_restarts
        if self._inline or not limit:
            return None
        return self._renewal("engine_restarts", limit)

    def _renewal(self, kind: str, limit: int) -> Renew:
        """How one of the workers that run now is started anew."""
        generation = self._generation

        async def renew(lost: WorkerLostError) -> Worker:
            return await self._renew(lost, kind, limit=limit, generation=generation)

        return renew

    async def _renew(
        self, lost: WorkerLostError, kind: str, *, limit: int, generation: int
    ) -> Worker:
        """A new worker in the place of one that is lost.

        Raises:
            WorkerLostError: all workers were ended; that is what it died of.
            EngineError: that happened more often since the last new step than `faults.<kind>` says.
        """
        assert self._runtime is not None
        while True:
            name = lost.worker
            if generation != self._generation:
                raise lost
            if not self.faults.allows(kind, limit):
                raise EngineError(
                    f"{self.faults.where}: {lost}; workers like it were started anew {limit} times "
                    f"since the last finished step, and that is the limit (faults.{kind}); what it "
                    f"said last is in {self._logs / name}.log"
                ) from lost
            self.faults.note(kind, cause=str(lost), action="starting it anew", worker=name)
            if (running := self._running.pop(name, None)) is not None:
                await self._runtime.end(running)
            if generation != self._generation:
                raise lost
            try:
                return await self._start(self._runtime, self._specs[name])
            except WorkerLostError as error:
                lost = error

    @property
    def _inline(self) -> bool:
        return self._config.runtime.kind == "inline"

    async def end_all(self) -> None:
        """End every worker; all can be started again then."""
        self._generation += 1
        self._running.clear()
        if self._runtime is not None:
            await self._runtime.end_all()

    async def memory(self) -> dict[str, float]:
        """`memory/*`: peaks of the processes since the last call, by role, the driver included.

        Workers that share a process share its peak; under `inline` that is the driver's.
        """
        own = take_memory()
        found = [("driver", own)]
        specs = [self._specs[name] for name in self._running]
        if self._inline:
            found += [(spec.role, own) for spec in specs]
            return memory_metrics(found)
        hosts = [self._running[spec.name] for spec in specs if spec.beside is None]
        uses = await asyncio.gather(*(host.memory() for host in hosts), return_exceptions=True)
        by_host = {host.name: use for host, use in zip(hosts, uses, strict=True)}
        for spec in specs:
            use = by_host.get(spec.beside or spec.name)
            if isinstance(use, MemoryUse):  # a process that died is someone else's business
                found.append((spec.role, use))
        return {**memory_metrics(found), **await self._stored()}

    async def _stored(self) -> dict[str, float]:
        # Ray may wait for ever for a head that is lost; whoever calls gives up sooner.
        return await self._threads.run(self._store.metrics, timeout=math.inf)

    def write_stacks(self, loop: asyncio.AbstractEventLoop) -> Path:
        """Write where all workers and the driver are, while the driver's loop is blocked; takes
        some seconds. Returns the folder; raises OSError where it can't be written."""
        suspects = self._runtime.suspects() if self._runtime is not None else []
        return asyncio.run(dump_stacks(self._stacks, "driver", suspects, stacks_there, loop=loop))

    async def close(self) -> None:
        """End every worker and what they live in."""
        self._generation += 1
        self._threads.close()
        if self._runtime is not None:
            await self._runtime.close()

    def _shipped_hooks(self) -> list[str]:
        return [str(path) for path in shipped_modules(self._hooks.refs)]

    async def _open_runtime(self, count: int) -> Runtime:
        if self._inline:
            return InlineRuntime()
        self._status("starting Ray")
        runtime = RayRuntime(
            self._config.runtime,
            logs=self._logs,
            workers=count,
            placement=self._config.placement,
            modules=sorted({*self._selection.shipped_modules(), *self._shipped_hooks()}),
            faults=self._config.faults,
            stacks=self._stacks,
            where=lambda: self.faults.where,
        )
        await asyncio.to_thread(runtime.connect)
        install_again()
        return runtime
