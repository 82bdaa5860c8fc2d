"""A worker in a Ray actor, from the driver's side: calls that are watched, errors that keep their
type, and an end that is one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import psutil

from rlx.core.engine.memory import MemoryUse
from rlx.core.engine.stacks import Location
from rlx.core.engine.watch import Watch
from rlx.core.errors import EngineError, WorkerLostError

_RAYS = 5.0
"""Seconds in which Ray ends a process; then it is killed past Ray."""
_PATIENCE = 10.0
"""Seconds that a killed process has to be gone."""


class RayProcess:
    """One actor's process, which several workers may share.

    Args:
        watch: over the calls to it.
    """

    def __init__(self, actor: Any, watch: Watch) -> None:
        self.actor = actor
        self.watch = watch
        self.location: Location | None = None
        self._process: psutil.Process | None = None

    async def locate(self) -> None:
        """Find out where it is; returns when Ray has made it."""
        self.location = await self.actor.location.remote()
        if self.location.here:
            with contextlib.suppress(psutil.Error):  # it died meanwhile
                self._process = psutil.Process(self.location.pid)

    def kill(self) -> None:
        """Have Ray end it; `gone` sees to it that it does end."""
        import ray

        ray.kill(self.actor)

    async def gone(self) -> None:
        """Return when a killed process has given back its memory.

        Ray gets the time to end it: a process that dies in another way is a crash to Ray, which
        prints a paragraph about it. A process that is stopped can't act on what Ray tells it.
        """
        process = self._process
        if process is None or await _ended(process, _RAYS, unless=psutil.STATUS_STOPPED):
            return
        with contextlib.suppress(psutil.Error):  # psutil notices a number that is used again
            process.kill()
        await _ended(process, _PATIENCE)


async def _ended(process: psutil.Process, seconds: float, *, unless: str = "") -> bool:
    """Wait for the end of a process; false when it takes longer or is in the state `unless`."""
    deadline = time.monotonic() + seconds
    while (state := _state(process)) is not None:
        if state == unless or time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True


def _state(process: psutil.Process) -> str | None:
    """psutil's word for the state of a process; None when it has ended."""
    try:
        state = str(process.status()) if process.is_running() else None
    except psutil.Error:
        return None
    return None if state == psutil.STATUS_ZOMBIE else state


class RayWorker:
    """A worker in a Ray actor."""

    def __init__(self, name: str, process: RayProcess) -> None:
        self.name = name
        self.process = process

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        answer = self.process.actor.call.remote(self.name, method, args, kwargs)
        return await self.answer(answer, method)

    async def stream(self, method: str, *args: Any) -> AsyncIterator[Any]:
        stream = self.process.actor.stream.options(num_returns="streaming")
        references = stream.remote(self.name, method, args)
        while True:
            try:
                reference = await self.answer(anext(references), method)
            except StopAsyncIteration:
                return
            yield await self.answer(reference, method)

    async def now(self, method: str, *args: Any) -> Any:
        return await self.answer(self.process.actor.now.remote(self.name, method, args), method)

    async def memory(self) -> MemoryUse:
        """Not watched: who asks has a time-out of its own."""
        return await self.process.actor.memory.remote()

    async def answer(self, reference: Awaitable[Any], method: str) -> Any:
        """Await a call's answer; raises what the worker raised, or that it is lost."""
        watched = self.process.watch.result(reference, worker=self.name, method=method)
        return await self._translated(watched, method)

    async def located(self) -> None:
        """Wait until Ray has made the process, however long it takes."""
        await self._translated(self.process.locate(), "start")

    async def _translated(self, answer: Awaitable[Any], method: str) -> Any:
        """Raise errors of Ray's as ours."""
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await answer
        except RayTaskError as error:
            raise _original(error) from None
        except RayActorError as error:
            what = f"died during '{method}': {first_line(error)}"
            raise WorkerLostError(self.name, what) from error


def _original(error: Any) -> BaseException:
    """The exception that the worker raised, with its remote traceback as a note."""
    cause = getattr(error, "cause", None)
    if not isinstance(cause, Exception):
        return EngineError(str(error))
    remote = "In the worker process:\n" + str(getattr(error, "traceback_str", error))
    if not any("In the worker process" in note for note in getattr(cause, "__notes__", ())):
        cause.add_note(remote)
    return cause


def first_line(error: BaseException) -> str:
    """The first line of its text that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
