"""The Ray actor that workers live in."""

from __future__ import annotations

import logging
import os
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from rlx.core.engine.logs import open_worker_log
from rlx.core.engine.process_stacks import write_stacks_on_signal
from rlx.core.engine.pulse import beats
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.engine.stacks import Location, own_location
from rlx.core.engine.worker_host import WorkerHost

_log = logging.getLogger("rlx.worker")


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
