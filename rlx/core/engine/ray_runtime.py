"""Workers as Ray actors, on this machine or a cluster."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.core.config import FaultsConfig, PlacementConfig, RuntimeConfig
from rlx.core.engine.actor_host import ActorHost
from rlx.core.engine.depot import RayDepot
from rlx.core.engine.ray_nodes import stacks_there
from rlx.core.engine.ray_worker import RayProcess, RayWorker, first_line
from rlx.core.engine.runtime import WorkerSpec, neighbour
from rlx.core.engine.stacks import Suspect, dump_stacks
from rlx.core.engine.watch import Patience, Watch
from rlx.core.errors import EngineError, UsageError
from rlx.core.openmp import openmp_environment

if TYPE_CHECKING:
    from rlx.core.engine.ray_placement import RayPlacement

_TOKEN = Path.home() / ".ray" / "auth_token"
_KNOCK = 10.0
"""Seconds that the head of a cluster has to take a connection."""


def _knock(address: str) -> None:
    """Raise `ConnectionError` where nobody listens: Ray itself tries again for minutes.

    Args:
        address: `host:port`; anything else (`auto`, `ray://…`) is left to Ray.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK).close()
    except OSError as error:
        raise ConnectionError(str(error)) from error


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
                _knock(address)
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
        beside = neighbour(self._workers, spec)
        process = beside.process if beside else self._process(spec)
        worker = RayWorker(spec.name, process)
        self._workers.append(worker)
        try:
            if beside is None:
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
        try:
            folder = await dump_stacks(self._stacks, name, self.suspects(), stacks_there)
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
