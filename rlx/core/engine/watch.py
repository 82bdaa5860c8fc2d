"""Notices a worker that hangs: the driver asks it for a sign of life as long as a call to it runs.

The questions are answered on the worker's event loop, beside the thread that works. No answer
within `answer` seconds: the process is stopped, gone, or its interpreter is held. Answers that
bring the same pulse (`rlx.core.engine.pulse`) for `progress` seconds: it does not get on. Only time
in which the driver itself ran counts, so that a suspended machine or a jump of the clock blames
nobody.

The questioner (`_ask_on`)
  consumes:      the worker's pulse
  waits for:     `every` seconds, then the answer
  unblocked by:  the end of the last running call, which ends it
  produces:      at most one verdict, which fails every running call
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rlx.core.errors import ClusterLostError, WorkerLostError

T = TypeVar("T")
_START = "start"
"""The method that imports and loads in pieces of any length; it has a time-out of its own."""
_SLICE = 0.1
"""Seconds of waiting after which the driver looks whether it ran itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a busy worker is waited for, in seconds."""

    every: float
    answer: float
    progress: float


class Watch:
    """Watches the calls to one worker's process.

    Args:
        ask: the worker's pulse.
        report: told the verdict once, before the calls fail; returns what is to be added to it
            (where the stacks are).
        lost: done with what is wrong when no worker can be reached any more.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[int]],
        patience: Patience,
        report: Callable[[str], Awaitable[str]],
        *,
        lost: asyncio.Future[str] | None = None,
    ) -> None:
        self._ask = ask
        self._patience = patience
        self._report = report
        self._lost = lost
        self.running: dict[asyncio.Future[Any], str] = {}
        """Calls that are waited for → method."""
        self._finished = 0
        self._asking: asyncio.Task[None] | None = None
        self._verdict: asyncio.Future[str] | None = None
        self._hangs = False

    async def result(self, answer: Awaitable[T], *, worker: str, method: str) -> T:
        """Await a call's answer.

        Raises:
            WorkerLostError: the worker hangs.
            ClusterLostError: no worker can be reached any more.
        """
        if self._verdict is None:
            self._verdict = asyncio.get_running_loop().create_future()
        call: asyncio.Future[Any] = asyncio.ensure_future(answer)
        self.running[call] = method
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._ask_on())
        try:
            either: set[asyncio.Future[Any]] = {call, self._verdict}
            if self._lost is not None:
                either.add(self._lost)
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            if self._lost is not None and self._lost.done():
                raise ClusterLostError(self._lost.result())
            what = f"hangs in '{method}': {self._verdict.result()}"
            raise WorkerLostError(worker, what, hung=True)
        finally:
            self._end(call)

    def _end(self, call: asyncio.Future[Any]) -> None:
        _drop(call)
        del self.running[call]
        self._finished += 1
        if not self.running and self._asking is not None and not self._hangs:
            self._asking.cancel()
            self._asking = None

    @property
    def _loading(self) -> bool:
        return set(self.running.values()) == {_START}

    async def _ask_on(self) -> None:
        last, still = (-1, -1), 0.0
        while True:
            every = self._patience.every
            still += await _pass(asyncio.sleep(every), most=2 * every)
            asked = asyncio.ensure_future(self._ask())
            waited = 0.0
            while not asked.done() and (waited < self._patience.answer or self._loading):
                waited += await _pass(asyncio.wait({asked}, timeout=_SLICE), most=2 * _SLICE)
            if not asked.done():
                _drop(asked)
                return await self._give_up(f"it has not answered for {waited:.0f} s")
            if asked.exception() is not None:  # it died, which the call itself tells
                continue
            now = (asked.result(), self._finished)
            still = 0.0 if now != last or self._loading else still + waited
            last = now
            if still >= self._patience.progress:
                return await self._give_up(f"it lives, but has not got on for {still:.0f} s")

    async def _give_up(self, why: str) -> None:
        verdict = self._verdict
        assert verdict is not None
        self._hangs = True  # from here on the end of the last call does not cancel this
        more = await self._report(why)
        if not verdict.done():
            verdict.set_result(f"{why}{more}")


def _drop(task: asyncio.Future[Any]) -> None:
    """Wait for it no more, whatever it comes to."""
    task.cancel()
    task.add_done_callback(lambda done: done.cancelled() or done.exception())


async def _pass(waiting: Awaitable[Any], *, most: float) -> float:
    """Await it; returns the seconds that it took, at most `most`."""
    started = time.monotonic()
    await waiting
    return min(time.monotonic() - started, most)
