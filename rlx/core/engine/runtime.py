"""What runs a run's workers, and how a worker is described.

A worker is a plain class. Runtimes (`InlineRuntime`: the driver's process, `RayRuntime`: Ray
actors) give it one thread of its own for its synchronous methods, run its asynchronous methods on
an event loop, and let `now` methods (`abort`) in while another method runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from rlx.core.engine.depot import Depot
from rlx.core.engine.memory import MemoryUse
from rlx.core.engine.stacks import Suspect
from rlx.core.errors import WorkerLostError
from rlx.core.hook_types import WorkerContext
from rlx.core.worker_hooks import HookRef, call_in_worker


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

    def suspects(self) -> list[Suspect]:
        """Its workers in processes of their own, for their stacks; called from any thread."""
        ...

    async def write_stacks(self, about: str) -> str:
        """Write where all its workers are, because one hangs; returns where that is, as a clause
        (`; the stacks of …`), empty where there is no place for them."""
        ...

    async def close(self) -> None:
        """End every worker and what they live in."""
        ...


T = TypeVar("T")
W = TypeVar("W", bound=Worker)


def neighbour(workers: Sequence[W], spec: WorkerSpec) -> W | None:
    """The running worker that `spec` shares a process with."""
    if spec.beside is None:
        return None
    return next(worker for worker in workers if worker.name == spec.beside)


async def wait_for_start(
    runtime: Runtime, name: str, work: Awaitable[T], *, timeout: float | None
) -> T:
    """Await a part of a worker's start.

    Args:
        timeout: `faults.start_timeout`; None: no limit.

    Raises:
        WorkerLostError: it takes longer; stacks are written.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
        stacks = await runtime.write_stacks(name)
        what = f"has not started within {timeout:g} s (faults.start_timeout){stacks}"
        raise WorkerLostError(name, what, hung=True)
    finally:
        task.cancel()
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
