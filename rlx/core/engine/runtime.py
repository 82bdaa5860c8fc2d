"""Where workers live: Ray actors (`RayRuntime`) or the driver's own process (`InlineRuntime`).

A worker is a plain class. Both runtimes give it one thread of its own for its synchronous methods
(CUDA contexts, OpenMP settings and process groups are per thread), run its asynchronous methods on
an event loop, and let `now` methods (`abort`) in while another method runs.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import logging
import os
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlx.core.config import FaultsConfig, PlacementConfig, RuntimeConfig
from rlx.core.engine.depot import Depot, LocalDepot, RayDepot, unpacked
from rlx.core.engine.logs import open_worker_log
from rlx.core.engine.memory import MemoryUse, take_memory
from rlx.core.engine.openmp import openmp_environment
from rlx.core.engine.pulse import beat, beats
from rlx.core.engine.ray_worker import RayProcess, RayWorker, first_line
from rlx.core.engine.stacks import (
    Location,
    Suspect,
    dump_stacks,
    own_location,
    write_stacks_on_signal,
)
from rlx.core.engine.watch import Patience, Watch
from rlx.core.errors import EngineError, UsageError
from rlx.core.hook_types import WorkerContext
from rlx.core.worker_hooks import HookRef, call_in_worker

if TYPE_CHECKING:
    from rlx.core.engine.ray_placement import RayPlacement

_log = logging.getLogger("rlx.worker")
_TOKEN = Path.home() / ".ray" / "auth_token"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHooks:
    """The driver's choice of plugins, for `rlx_on_worker_start` in the worker's process."""

    refs: tuple[HookRef, ...]
    run_folder: str

    def run(self, role: str, rank: int, world: int) -> None:
        context = WorkerContext(role=role, rank=rank, world_size=world, run_folder=self.run_folder)
        call_in_worker(self.refs, context)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """How to make a worker: the class as `module:Class`, its arguments, what it needs."""

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    cpus: float = 1.0
    gpus: int = 0
    """GPUs of one node that it works on, where there are any."""
    beside: str | None = None
    """Name of a worker that was started before, whose process and thread this one shares."""
    role: str = "worker"
    """`rollout`, `learner`, `critic`, `scorer` or `reward`: what hooks are told."""
    rank: int = 0
    world: int = 1
    hooks: WorkerHooks | None = None
    answer_timeout: float | None = None
    """Seconds, in the place of `faults.answer_timeout`."""
    progress_timeout: float | None = None
    """Seconds, in the place of `faults.progress_timeout`."""


class Worker(Protocol):
    """A handle on a running worker."""

    name: str

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method and wait for its result; errors keep their type."""
        ...

    def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """Iterate over an asynchronous generator method."""
        ...

    async def now(self, method: str, *args: Any) -> Any:
        """Run a short method at once, even while another one runs."""
        ...

    async def memory(self) -> MemoryUse:
        """Peak memory of the worker's process since the last call for that process."""
        ...


class Runtime(Protocol):
    @property
    def depot(self) -> Depot:
        """How batches get to its workers."""
        ...

    async def seat(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Find a place for workers that are to start; returns their specs with what that says."""
        ...

    async def start(self, spec: WorkerSpec) -> Worker: ...

    async def end(self, worker: Any) -> None:
        """End one worker, whatever it is doing."""
        ...

    async def end_all(self) -> None:
        """End every worker that this runtime started; others can be started then."""
        ...

    async def close(self) -> None:
        """End every worker and what they live in."""
        ...


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


W = TypeVar("W", bound=Worker)


def _neighbour(workers: Sequence[W], spec: WorkerSpec) -> W | None:
    """The running worker that `spec` shares a process with."""
    if spec.beside is None:
        return None
    return next(worker for worker in workers if worker.name == spec.beside)


class InlineRuntime:
    def __init__(self) -> None:
        self.depot = LocalDepot()
        self._workers: list[InlineWorker] = []

    async def seat(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        return list(specs)

    async def start(self, spec: WorkerSpec) -> InlineWorker:
        os.environ.update(openmp_environment())
        os.environ.update(spec.env)
        neighbour = _neighbour(self._workers, spec)
        host = neighbour.host if neighbour else WorkerHost(spec.name)
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

    async def close(self) -> None:
        await self.end_all()


class ActorHost(WorkerHost):
    """`WorkerHost` inside a Ray actor, with its output in the run's folder."""

    def __init__(self, name: str, log_path: str | None) -> None:
        open_worker_log(log_path)
        write_stacks_on_signal()
        super().__init__(name)

    async def call(
        self, worker: str, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        return await _picklable_errors(super().call(worker, method, args, kwargs), worker)

    async def construct(self, spec: WorkerSpec) -> None:
        await _picklable_errors(super().construct(spec), spec.name)
        place = f"role {spec.role}, rank {spec.rank} of {spec.world}, process {os.getpid()}"
        _log.info("%s is made: %s", spec.name, place)

    async def stream(  # type: ignore[override]
        self, worker: str, method: str, args: Sequence[Any]
    ) -> AsyncIterator[Any]:
        async for item in super().stream(worker, method, args):
            yield item

    async def now(self, worker: str, method: str, args: Sequence[Any]) -> Any:
        return super().now(worker, method, args)

    async def pulse(self) -> int:
        """How far the process has got."""
        return beats()

    async def location(self) -> Location:
        """Where the process is."""
        return own_location()


async def _picklable_errors(awaitable: Any, worker: str) -> Any:
    """Put the worker's traceback on an error as a note: Ray's wrapper loses it."""
    try:
        return await awaitable
    except Exception as error:
        _log.exception("%s failed", worker)
        error.add_note("In the worker process:\n" + traceback.format_exc())
        raise


class RayRuntime:
    """Starts a private Ray on this machine, or joins a running one."""

    def __init__(
        self,
        settings: RuntimeConfig,
        *,
        logs: Path | None,
        workers: int,
        modules: Sequence[str] = (),
        placement: PlacementConfig = PlacementConfig(),
        faults: FaultsConfig = FaultsConfig(),
        stacks: Path | None = None,
    ) -> None:
        """`stacks`: folder for the stacks of all workers, when one of them hangs."""
        self._settings = settings
        self._faults = faults
        self._stacks = stacks
        self._logs = logs
        self._slots = workers
        self._modules = list(modules)
        self._placement_settings = placement
        self._placement: RayPlacement | None = None
        self._workers: list[RayWorker] = []
        self._started_ray = False
        self.depot = RayDepot()

    @property
    def _address(self) -> str | None:
        """Of the cluster to join; Ray itself names it to what `ray job submit` runs."""
        return self._settings.ray_address or os.environ.get("RAY_ADDRESS") or None

    def connect(self) -> None:
        """Start or join Ray (blocking, some seconds)."""
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        address = self._address
        if address and _TOKEN.is_file():
            # Where there is a token, Ray asks for it, and doesn't show it itself when it joins.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        import ray

        if ray.is_initialized():
            return
        # Ray reads its variables when it is imported, which vLLM may have done long ago.
        compiled: Any = ray._raylet
        compiled.Config.initialize("")
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "include_dashboard": False,
        }
        if address:
            remote_env = {"py_modules": self._modules} if self._modules else None
            try:
                ray.init(address=address, runtime_env=remote_env, log_to_driver=False)
            except ConnectionError as error:
                raise UsageError(
                    f"there is no Ray cluster at {address}: {first_line(error)}",
                    where="runtime.ray_address" if self._settings.ray_address else "RAY_ADDRESS",
                    fix="`ray start --head` first, or leave the address out for a Ray of the run's "
                    "own",
                ) from error
        else:
            cpus = max(os.cpu_count() or 1, self._slots)
            # "local": without it, Ray joins whatever `ray start` has left on this machine.
            ray.init(address="local", num_cpus=cpus, object_store_memory=512 * 2**20, **common)
        self._started_ray = True

    async def seat(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Reserve nodes and GPUs; on a machine of one's own without GPUs there is no choice."""
        import ray

        from rlx.core.engine.ray_placement import RayPlacement

        if self._placement is None and (self._address or ray.cluster_resources().get("GPU")):
            self._placement = await asyncio.to_thread(
                RayPlacement.reserve, specs, self._placement_settings
            )
        return self._placement.settle(specs) if self._placement else list(specs)

    async def start(self, spec: WorkerSpec) -> RayWorker:
        neighbour = _neighbour(self._workers, spec)
        process = neighbour.process if neighbour else self._process(spec)
        worker = RayWorker(spec.name, process)
        self._workers.append(worker)
        try:
            if neighbour is None:
                await self._located(worker)
            await worker.answer(process.actor.construct.remote(spec), "start")
        except BaseException:
            worker.process.kill()
            raise
        return worker

    async def _located(self, worker: RayWorker) -> None:
        limit = self._faults.start_timeout
        try:
            await asyncio.wait_for(worker.located(), limit)
        except TimeoutError:
            raise EngineError(
                f"Ray has found no place for the worker '{worker.name}' for {limit:g} s "
                "(faults.start_timeout): `ray status` says what the cluster has and what it lacks"
            ) from None

    def _process(self, spec: WorkerSpec) -> RayProcess:
        faults = self._faults
        actor = self._actor(spec)
        patience = Patience(
            every=faults.heartbeat,
            answer=spec.answer_timeout or faults.answer_timeout,
            progress=spec.progress_timeout or faults.progress_timeout,
        )

        async def report(why: str) -> str:
            return await self._report(spec.name, why)

        return RayProcess(actor, Watch(actor.pulse.remote, patience, report))

    async def _report(self, name: str, why: str) -> str:
        """Write down where all workers are, because one hangs; returns where that is."""
        if self._stacks is None:
            return ""
        folder = self._stacks / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
        suspects = {
            worker.process: Suspect(
                name=worker.name,
                location=worker.process.location,
                doing=sorted(set(worker.process.watch.running.values())),
                log=self._logs / f"{worker.name}.log" if self._logs else None,
            )
            for worker in reversed(self._workers)
            if worker.process.location is not None
        }
        await dump_stacks(folder, list(suspects.values()))
        return f"; the stacks of all workers are in {folder}"

    def _actor(self, spec: WorkerSpec) -> Any:
        import ray

        actor_class: Any = ray.remote(ActorHost)
        log = str(self._logs / f"{spec.name}.log") if self._logs else None
        return actor_class.options(
            num_cpus=spec.cpus,
            num_gpus=0,  # the spec's environment says which ones it sees
            max_concurrency=10_000,  # one call for each episode that waits for the engine
            runtime_env={"env_vars": {**openmp_environment(), **spec.env}},
            **(self._placement.options(spec) if self._placement else {}),
        ).remote(spec.name, log)

    async def end(self, worker: RayWorker) -> None:
        worker.process.kill()
        self._workers.remove(worker)
        await worker.process.gone()

    async def end_all(self) -> None:
        """End every worker; others can be started then."""
        processes = {worker.process for worker in self._workers}
        for worker in reversed(self._workers):
            worker.process.kill()
        self._workers.clear()
        await asyncio.gather(*(process.gone() for process in processes))

    async def close(self) -> None:
        import ray

        await self.end_all()
        if self._placement is not None:
            self._placement.release()
            self._placement = None
        self.depot.close()
        gc.collect()  # references to Ray objects must not outlive Ray
        if self._started_ray:
            await asyncio.to_thread(ray.shutdown)
            self._started_ray = False
