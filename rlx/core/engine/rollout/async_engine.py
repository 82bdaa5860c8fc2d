"""A synchronous engine core on a thread of its own, behind an asyncio facade.

The thread (`_run`)
  consumes:      commands (add requests, abort, load weights, stop) in the order of their arrival
  waits for:     a command, when no request runs; else it takes what there is and steps
  unblocked by:  `_submit`
  produces:      finished generations, on the asyncio queue of the call that asked for them
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rlx.core.engine.interfaces import GenerateRequest, Generation, PublishReport, WeightsUpdate
from rlx.core.engine.pulse import beat
from rlx.core.engine.rollout.core import EngineCore, Finished, Key
from rlx.core.engine.rollout.stats import EngineStats
from rlx.core.engine.transfer.errors import LearnerLostError
from rlx.core.errors import EngineError, WorkerLostError

T = TypeVar("T")


class _Call:
    """One `generate` call: its event loop, its queue and the requests that still run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.replies: asyncio.Queue[list[Generation] | EngineError] = asyncio.Queue()
        self.running: set[Key] = set()

    def reply(self, item: list[Generation] | EngineError) -> None:
        # A closed loop belongs to a caller that is gone: nobody waits for the answer.
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.replies.put_nowait, item)


class AsyncEngine:
    """Implements `RolloutEngine` with an `EngineCore`."""

    def __init__(self, core: EngineCore, *, name: str) -> None:
        self._core = core
        self._name = name
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = (
            queue.SimpleQueue()
        )
        self._calls: dict[Key, _Call] = {}
        self._keys = itertools.count()
        self._failure: EngineError | None = None
        self._thread: threading.Thread | None = None
        self._stop_error: EngineError | None = None
        self._open = False
        self._lock = threading.Lock()

    def start(self) -> Mapping[str, Any]:
        """Load the model on the engine's thread; blocks until it is ready."""
        if self._thread is not None:
            raise EngineError(f"{self._name} was started before")
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._open = True
        self._thread.start()
        try:
            return self._submit(self._core.start).result()
        except BaseException:
            self._close()
            raise

    async def generate(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncIterator[list[Generation]]:
        """Yield finished generations as they come.

        Raises:
            EngineError: a request can't run (then none of the call's does), or the engine failed.
        """
        call = _Call(asyncio.get_running_loop())
        remaining = len(requests)
        try:
            await self._ask(lambda: self._add(call, requests))
            while remaining:
                reply = await call.replies.get()
                if isinstance(reply, EngineError):
                    raise _copy(reply)
                remaining -= len(reply)
                yield reply
        finally:
            if remaining:
                self._submit(lambda: self._drop(call))

    async def abort(self) -> None:
        """End all running requests; their callers get the partial output."""
        await self._ask(self._abort_all)

    async def load_weights(self, update: WeightsUpdate) -> PublishReport:
        """Replace the weights between two steps; nothing is sampled until all of them are there.

        Raises:
            WorkerLostError: what came does not fit or is damaged; the engine is of no use any more.
            EngineError: the learner gave up in the middle. The engine takes no request any more,
                but it is not to blame.
        """
        return await self._ask(lambda: self._load_weights(update))

    async def sleep(self, level: int) -> None:
        """Give device memory up until the next `load_weights`.

        Raises:
            EngineError: requests run.
        """
        await self._ask(lambda: self._sleep(level))

    async def take_stats(self) -> EngineStats:
        """What the engine did since the last call."""
        return await self._ask(self._core.take_stats)

    async def forget(self) -> None:
        """Drop every cached prefix."""
        await self._ask(self._core.forget)

    async def stop(self) -> None:
        """Fail what still runs, unload the model and end the thread."""
        thread = self._thread
        if thread is None:
            return
        self._close()
        await asyncio.to_thread(thread.join)
        if self._stop_error is not None:
            raise self._stop_error

    def _close(self) -> None:
        """Take no more commands; the thread ends after those that it has."""
        with self._lock:
            if self._open:
                self._open = False
                self._commands.put(None)

    # From here on: the engine's thread, except `_submit` and `_ask`.

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            if self._open:
                self._commands.put((function, future))
            else:
                future.set_exception(EngineError(f"{self._name} is not running"))
        return future

    async def _ask(self, function: Callable[[], T]) -> T:
        return await asyncio.wrap_future(self._submit(function))

    def _run(self) -> None:
        while True:
            try:
                command = self._commands.get(block=self._idle())
            except queue.Empty:
                self._step()
                continue
            if command is None:
                break
            self._execute(*command)
        self._fail(EngineError(f"{self._name} was stopped"))
        try:
            self._core.stop()
        except Exception as error:
            self._stop_error = _engine_error(self._name, error)

    def _idle(self) -> bool:
        return self._failure is not None or not self._core.busy()

    def _execute(self, function: Callable[[], Any], future: Future[Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self._failure is not None:
            future.set_exception(_copy(self._failure))
            return
        try:
            future.set_result(function())
            beat()
        except EngineError as error:
            future.set_exception(error)
        except BaseException as error:
            self._fail(_engine_error(self._name, error))
            future.set_exception(_engine_error(self._name, error))

    def _step(self) -> None:
        try:
            self._deliver(self._core.step())
            beat()
        except BaseException as error:
            self._fail(_engine_error(self._name, error))

    def _add(self, call: _Call, requests: Sequence[GenerateRequest]) -> None:
        for request in requests:
            self._core.check(request)
        for request in requests:
            key = next(self._keys)
            self._calls[key] = call
            call.running.add(key)
            self._core.add(key, request)

    def _deliver(self, finished: Finished) -> None:
        by_call: dict[_Call, list[Generation]] = {}
        for key, generation in finished:
            call = self._calls.pop(key)
            call.running.discard(key)
            by_call.setdefault(call, []).append(generation)
        for call, generations in by_call.items():
            call.reply(generations)

    def _load_weights(self, update: WeightsUpdate) -> PublishReport:
        try:
            return self._core.load_weights(update)
        except LearnerLostError as error:
            failure = EngineError(
                f"{self._name} did not get the weights of version {update.version}: {error}"
            )
            self._fail(failure)
            raise failure from error

    def _sleep(self, level: int) -> None:
        if self._calls:
            raise EngineError(f"{self._name} can't sleep: {len(self._calls)} requests run")
        self._core.sleep(level)

    def _abort_all(self) -> None:
        self._deliver(self._core.abort(list(self._calls)))

    def _drop(self, call: _Call) -> None:
        """Abort a call whose consumer has gone; its output is nobody's."""
        keys = sorted(call.running)
        call.running.clear()
        for key in keys:
            del self._calls[key]
        self._core.abort(keys)

    def _fail(self, error: EngineError) -> None:
        """Refuse everything from now on, and tell everybody who waits."""
        self._failure = self._failure or error
        for call in set(self._calls.values()):
            call.running.clear()
            call.reply(error)
        self._calls.clear()


def _engine_error(name: str, error: BaseException) -> WorkerLostError:
    """Wrap an unexpected error, after which the core is of no use any more; its traceback becomes a
    note, which survives pickling."""
    wrapped = WorkerLostError(name, f"failed: {type(error).__name__}: {error}")
    wrapped.add_note("On the engine's thread:\n" + "".join(traceback.format_exception(error)))
    return wrapped


def _copy(error: EngineError) -> EngineError:
    """An error of one's own for each caller: a raised exception collects tracebacks."""
    copy = (
        WorkerLostError(error.worker, error.what)
        if isinstance(error, WorkerLostError)
        else EngineError(*error.args)
    )
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy
