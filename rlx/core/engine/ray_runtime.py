"""Workers as Ray actors, on this machine or a cluster."""

from __future__ import annotations

import asyncio
import atexit
import functools
import gc
import logging
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.core.config import FaultsConfig, PlacementConfig, RuntimeConfig
from rlx.core.engine.actor_host import ActorHost
from rlx.core.engine.depot import RayDepot
from rlx.core.engine.ray_head import Head, HeadWatch, knock, unless
from rlx.core.engine.ray_nodes import stacks_there
from rlx.core.engine.ray_worker import RayProcess, RayWorker, first_line
from rlx.core.engine.runtime import WorkerSpec, neighbour, wait_for_start
from rlx.core.engine.stacks import Suspect, dump_stacks
from rlx.core.engine.watch import Patience, Watch
from rlx.core.errors import EngineError, UsageError
from rlx.core.openmp import openmp_environment
from rlx.core.threads import CallTimeoutError, DaemonThreads, call_within

if TYPE_CHECKING:
    from rlx.core.engine.ray_placement import RayPlacement

_log = logging.getLogger(__name__)
_TOKEN = Path.home() / ".ray" / "auth_token"
_JOIN = 180.0
"""Seconds in which Ray joins a cluster whose head answers, files that are shipped included."""
_LEAVE = 20.0
"""Seconds that Ray has to end workers, and to leave a cluster or to end its own processes."""


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
        where: Callable[[], str] = lambda: "",
    ) -> None:
        """
        Args:
            stacks: folder for the stacks of all workers, when one of them hangs.
            where: the step and the phase that the run is at, for messages.
        """
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
        self._head = HeadWatch(faults, where=where)
        self._threads = DaemonThreads("ray")
        self.depot = RayDepot()

    @property
    def _address(self) -> str | None:
        """Of the cluster to join; Ray itself names it to what `ray job submit` runs."""
        return self._settings.ray_address or os.environ.get("RAY_ADDRESS") or None

    def connect(self) -> None:
        """Start or join Ray (blocking, some seconds).

        Raises:
            UsageError: there is no cluster at the address, or it does not let this process in.
        """
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
        # Without a head it would end this process after a minute, without a word of ours.
        os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
        # Ray reads its variables when it is imported, which vLLM may have done long ago.
        compiled: Any = ray._raylet
        compiled.Config.initialize("")
        common: dict[str, Any] = {
            "log_to_driver": False,
            "logging_level": "ERROR",
            "include_dashboard": False,
        }
        if address:
            self._join(address)
        else:
            cpus = max(os.cpu_count() or 1, self._slots)
            # "local": without it, Ray joins whatever `ray start` has left on this machine.
            ray.init(address="local", num_cpus=cpus, object_store_memory=512 * 2**20, **common)
        self._started_ray = True

    def _join(self, address: str) -> None:
        import ray

        env = {"py_modules": self._modules} if self._modules else None
        init = functools.partial(ray.init, address, runtime_env=env, log_to_driver=False)
        try:
            knock(address)
            call_within(_JOIN, init)
        except (ConnectionError, CallTimeoutError, ValueError, OverflowError) as error:
            why = first_line(error)
            if isinstance(error, CallTimeoutError):
                why = f"it answers, but could not be joined within {_JOIN:g} s"
            raise UsageError(
                f"there is no Ray cluster at {address} that can be joined: {why}",
                where="runtime.ray_address" if self._settings.ray_address else "RAY_ADDRESS",
                fix="`ray status` on its head says whether it is well; `ray start --head` starts "
                "one; without an address the run has a Ray of its own",
            ) from None

    def _watch_head(self) -> None:
        """From now on a head that is lost fails what waits for the cluster."""
        import ray

        context = ray.get_runtime_context()
        self._head.start(Head(context.gcs_address), context.get_node_id())

    async def seat(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Reserve nodes and GPUs; on a machine of one's own without GPUs there is no choice."""
        import ray

        from rlx.core.engine.ray_placement import RayPlacement

        self._watch_head()
        if self._placement is None and (self._address or ray.cluster_resources().get("GPU")):
            reserve = functools.partial(RayPlacement.reserve, specs, self._placement_settings)
            self._placement = await unless(
                self._head.lost, self._threads.run(reserve, timeout=math.inf)
            )
        return self._placement.settle(specs) if self._placement else list(specs)

    async def start(self, spec: WorkerSpec) -> RayWorker:
        self._watch_head()
        beside = neighbour(self._workers, spec)
        process = beside.process if beside else await self._process(spec)
        worker = RayWorker(spec.name, process)
        self._workers.append(worker)
        try:
            if beside is None:
                await self._located(worker)
            made = worker.answer(process.actor.construct.remote(spec), "start")
            await wait_for_start(self, spec.name, made, timeout=self._faults.start_timeout)
        except BaseException:
            await self._in_time(worker.process.kill)
            raise
        return worker

    async def _located(self, worker: RayWorker) -> None:
        limit = self._faults.start_timeout
        try:
            await asyncio.wait_for(unless(self._head.lost, worker.located()), limit)
        except TimeoutError:
            raise EngineError(
                f"Ray has found no place for the worker '{worker.name}' for {limit:g} s "
                "(faults.start_timeout): `ray status` says what the cluster has and what it lacks"
            ) from None

    async def _process(self, spec: WorkerSpec) -> RayProcess:
        faults = self._faults
        # Ray asks the head for it, and waits for the answer.
        asked = self._threads.run(self._actor, spec, timeout=faults.start_timeout)
        actor = await unless(self._head.lost, asked)
        patience = Patience(
            every=faults.heartbeat,
            answer=spec.answer_timeout or faults.answer_timeout,
            progress=spec.progress_timeout or faults.progress_timeout,
        )

        async def report(why: str) -> str:
            return await self.write_stacks(spec.name)

        watch = Watch(actor.pulse.remote, patience, report, lost=self._head.lost)
        return RayProcess(actor, watch)

    async def write_stacks(self, about: str) -> str:
        if self._stacks is None:
            return ""
        try:
            folder = await dump_stacks(self._stacks, about, self.suspects(), stacks_there)
        except OSError as error:  # the verdict counts, and the run has to end
            return f"; the stacks could not be written: {error}"
        return f"; the stacks of all workers are in {folder}"

    def suspects(self) -> list[Suspect]:
        found = {
            worker.process: Suspect(
                name=worker.name,
                location=worker.process.location,
                doing=sorted(set(worker.process.watch.running.values())),
            )
            for worker in reversed(list(self._workers))
            if worker.process.location is not None
        }
        return list(found.values())

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
        self._workers.remove(worker)
        await self._end([worker.process])

    async def end_all(self) -> None:
        """End every worker; others can be started then."""
        processes = {worker.process for worker in reversed(self._workers)}
        self._workers.clear()
        await self._end(list(processes))

    async def _end(self, processes: Sequence[RayProcess]) -> None:
        def kill() -> None:
            for process in processes:
                process.kill()

        await self._in_time(kill)
        await asyncio.gather(*(process.gone() for process in processes))

    async def close(self) -> None:
        self._head.close()
        await self.end_all()
        if not await self._in_time(self._leave):
            import ray

            atexit.unregister(ray.shutdown)  # it would wait again
        self._threads.close()

    def _leave(self) -> None:
        import ray

        if self._placement is not None:
            self._placement.release()
            self._placement = None
        self.depot.close()
        gc.collect()  # references to Ray objects must not outlive Ray
        if self._started_ray:
            ray.shutdown()
            self._started_ray = False

    async def _in_time(self, function: Callable[[], None]) -> bool:
        """Whether Ray has done it within `_LEAVE`; a cluster whose head is lost may never."""
        from ray.exceptions import RayError

        try:
            await self._threads.run(function, timeout=_LEAVE)
        except (CallTimeoutError, RayError) as error:
            _log.warning("Ray has not ended what it was to end: %s", error)
            return False
        return True
