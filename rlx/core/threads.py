"""Threads that may be given up: a call that hangs costs its thread, not the run.

`concurrent.futures` won't do: its threads are joined at exit, so that one hanging call would keep
the process alive for ever, and a pool whose threads all hang serves nobody.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class CallTimeoutError(Exception):
    """A call took longer than its time-out."""


class DaemonThreads:
    """Runs functions in daemon threads; as many threads as calls at once (the caller bounds them).

    Python can't kill a thread. One that outlives its time-out is abandoned: it is counted in
    `stuck` until its call returns after all, and a new thread takes its place.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[_Thread] = []
        self._lock = threading.Lock()
        self._stuck = 0

    @property
    def stuck(self) -> int:
        """Threads that are still in a call that was given up."""
        return self._stuck

    async def run(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """Return `function(*args)`; raises what it raises, or `CallTimeoutError`."""
        with self._lock:
            thread = self._idle.pop() if self._idle else _Thread(self, self._name)
        loop = asyncio.get_running_loop()
        done: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        job = _Job(contextvars.copy_context(), function, args, loop, done)
        thread.jobs.put(job)
        try:
            value, error = await within(timeout, done)
        except BaseException:  # given up, or the waiting task was cancelled
            with self._lock:
                if not job.finished:
                    job.abandoned = True
                    self._stuck += 1
            raise
        if error is not None:
            raise error
        return value

    def close(self) -> None:
        """End the idle threads; busy ones end with their call or with the process."""
        with self._lock:
            while self._idle:
                self._idle.pop().jobs.put(None)

    def _finish(self, thread: _Thread, job: _Job) -> bool:
        """Take a thread back after its call; False when another one took its place."""
        with self._lock:
            job.finished = True
            if job.abandoned:
                self._stuck -= 1
            else:
                self._idle.append(thread)
            return not job.abandoned


async def within(timeout: float, work: Awaitable[T]) -> T:
    """Await `work`; raises `CallTimeoutError` after `timeout` s (`TimeoutError` is the work's)."""
    scope = asyncio.timeout(timeout)
    try:
        async with scope:
            return await work
    except TimeoutError:
        if scope.expired():
            raise CallTimeoutError from None
        raise


def call_within(timeout: float, function: Callable[[], T]) -> T:
    """Return `function()`, called in a thread of its own (blocking).

    Raises:
        CallTimeoutError: after `timeout` s; the call is left behind.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    try:
        return answer.result(timeout)
    except TimeoutError:
        if answer.done():
            raise
        raise CallTimeoutError from None


class _Job:
    __slots__ = ("abandoned", "args", "context", "done", "finished", "function", "loop")

    def __init__(
        self,
        context: contextvars.Context,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        loop: asyncio.AbstractEventLoop,
        done: asyncio.Future[tuple[Any, BaseException | None]],
    ) -> None:
        self.context = context
        self.function = function
        self.args = args
        self.loop = loop
        self.done = done
        self.finished = False
        self.abandoned = False

    def run(self) -> tuple[Any, BaseException | None]:
        try:
            return self.context.run(self.function, *self.args), None
        except BaseException as error:  # sys.exit() in a user's function ends the call, no more
            return None, error


class _Thread:
    def __init__(self, owner: DaemonThreads, name: str) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._owner = owner
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        """Consumes jobs; waits for the next; unblocked by None; produces results on the loop."""
        keep = True
        while keep and (job := self.jobs.get()) is not None:
            result = job.run()
            keep = self._owner._finish(self, job)
            with contextlib.suppress(RuntimeError):  # the loop closed while the call ran
                job.loop.call_soon_threadsafe(_deliver, job.done, result)


def _deliver(
    done: asyncio.Future[tuple[Any, BaseException | None]],
    result: tuple[Any, BaseException | None],
) -> None:
    if not done.done():
        done.set_result(result)
