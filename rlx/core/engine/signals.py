"""Ctrl-C and SIGTERM, answered even while the event loop is blocked.

`loop.add_signal_handler` answers on the loop, which a component that never returns blocks. Here a
thread reads the signals' numbers from the pipe of `signal.set_wakeup_fd`, which is written from C.

The thread (`_serve`)
  consumes:      numbers of signals
  waits for:     the first of them; then `_LOOK_EVERY`
  unblocked by:  the end of the context
  produces:      the call of `first` on the loop, an exception in what blocks it, at the deadline or
                 with the second signal the end of the process
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import FrameType, TracebackType
from typing import Any

from rlx.core import calls, stalls
from rlx.core.engine.processes import end_descendants
from rlx.core.errors import RunInterrupted

STOPPED = (asyncio.CancelledError, RunInterrupted, calls.CallEnded)
"""What the work ends with that a signal has ended."""
_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_STOP_SECONDS = 9.0
"""After this long an interrupted run ends whatever it is waiting for, unless it saves its work."""
_BLOCKED_SECONDS = 3.0
"""After this long what blocks the loop is ended, so that the rest of the time is for the end."""
_AGAIN = 1.0
"""Seconds between two exceptions in the same component."""
_TELLING = 1.0
"""Seconds that standard error has to take a message."""
_LOOK_EVERY = 0.02
"""Often, because each of very many agents may block the loop once more before it is cancelled."""
_MOST = 1.0
"""Seconds that may pass between two looks and still count: the process may be stopped."""


class Signals:
    """A context of the running event loop in which signals end what it runs.

    The first one ends it in order. A second one, or the deadline, ends the process at once. Where
    the loop does not run in the main thread, nothing is changed.

    Args:
        first: called on the loop with the number of the first signal.
        where: step and phase, for messages.
        saved: what there is on disk and how to go on, a clause; for messages.
        saving: whether the run is at what would be lost if it were cut.
        stop_timeout: seconds that saving may take.
    """

    def __init__(
        self,
        first: Callable[[int], object],
        *,
        where: Callable[[], str],
        saved: Callable[[], str],
        saving: Callable[[], bool] = lambda: False,
        stop_timeout: float = float("inf"),
    ) -> None:
        self.number: int | None = None
        """The first signal, as soon as it came."""
        self._first = first
        self._where = where
        self._saved = saved
        self._saving = saving
        self._stop_timeout = stop_timeout
        self._taken = False
        """Whether the loop has called `first`."""
        self._asked = False
        """Whether the loop was asked for a sign of life that has not come yet."""
        self._told = False
        self._ended: tuple[object, float] = (None, 0.0)
        """What was ended last, and when."""
        self._over = threading.Event()
        self._undo = ExitStack()
        self._others = -1
        """The wakeup descriptor of somebody else, who gets the other signals."""

    def __enter__(self) -> Signals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._loop = asyncio.get_running_loop()
        self._main = threading.get_ident()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._before = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._others = self._before
        self._undo.callback(self._stop)
        for number in _NUMBERS:
            before = signal.getsignal(number)
            self._undo.callback(signal.signal, number, before or signal.SIG_DFL)
        self._install()
        self._undo.enter_context(calls.interruptible())
        self._thread = threading.Thread(target=self._serve, name="rlx-signals", daemon=True)
        self._thread.start()
        _open.append(self)
        return self

    def _install(self) -> None:
        for number in _NUMBERS:
            signal.signal(number, self._noted)
            signal.siginterrupt(number, False)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._undo.close()

    def _stop(self) -> None:
        """The last thing that is undone: handlers are the old ones already."""
        self._over.set()
        try:
            signal.set_wakeup_fd(self._before)
        except (OSError, ValueError):  # whose it was has closed it
            signal.set_wakeup_fd(-1)
        with suppress(OSError):
            self._write.send(b"\0")
        self._thread.join(1.0)
        self._read.close()
        self._write.close()
        _open.remove(self)

    def _noted(self, number: int, frame: FrameType | None) -> None:
        """Python's handler: without one the signal's default action would be taken. An event loop
        that got a handler of its own meanwhile has taken the descriptor; it is taken back."""
        own = self._write.fileno()
        current = signal.set_wakeup_fd(own, warn_on_full_buffer=False)
        if current != own:
            self._others = current
            self._write.send(bytes([number]))

    def _serve(self) -> None:
        waited = idle = silent = 0.0
        looked = time.monotonic()
        while not self._over.is_set():
            for number in self._arrived(None if self.number is None else _LOOK_EVERY):
                if self.number is not None:
                    self._cut(f"{signal.Signals(number).name} again")
                    return
                self.number = number
                looked = time.monotonic()
                with suppress(RuntimeError):  # the loop has closed
                    self._loop.call_soon_threadsafe(self._take)
            now = time.monotonic()
            passed, looked = min(now - looked, _MOST), now
            if self.number is None or self._over.is_set():
                continue
            waited += passed
            idle = 0.0 if self._saving() else idle + passed
            silent = silent + passed if self._asked else self._ask()
            if self._is_held(idle, silent):
                self._unblock(idle)
            if idle >= _STOP_SECONDS or waited >= self._stop_timeout:
                self._cut(f"no end in order within {waited:.0f} s")
                return

    def _arrived(self, timeout: float | None) -> list[int]:
        """Signals of ours that came; the others are passed on."""
        ready, _, _ = select.select([self._read], [], [], timeout)
        data = self._read.recv(4096) if ready else b""
        others = bytes(number for number in data if number not in (0, *_NUMBERS))
        if others and self._others >= 0:
            with suppress(OSError):
                os.write(self._others, others)
        return [number for number in data if number in _NUMBERS]

    def _take(self) -> None:
        self._taken = True
        assert self.number is not None
        self._first(self.number)

    def _ask(self) -> float:
        """Ask the loop for a sign of life; returns 0."""

        def alive() -> None:
            self._asked = False

        self._asked = True
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(alive)
        return 0.0

    def _is_held(self, idle: float, silent: float) -> bool:
        """Whether something keeps the loop from ending in order: what ran when the signal came,
        later a component that is told of the end, for longer, or an agent that goes on."""
        if not self._taken:
            return idle >= _BLOCKED_SECONDS
        if calls.under_way(self._main) is not None:
            return idle >= 2 * _BLOCKED_SECONDS
        return silent > (_BLOCKED_SECONDS if self._saving() else _LOOK_EVERY)

    def _unblock(self, idle: float) -> None:
        """End the component or agent that holds the loop; the same one again only after a while,
        in which it may clean up."""
        now, blocker = time.monotonic(), stalls.blocker(self._loop, self._main)
        if blocker is self._ended[0] and now - self._ended[1] < _AGAIN:
            return
        self._ended = (blocker, now)
        name, what = stopped_by(self.number), stalls.blocking(self._loop, self._main)
        if not self._told and (blocker is not None or not self._taken):
            self._told = True
            ended = "" if blocker is None else ", and is ended now"
            left = self._stop_timeout if self._saving() else max(_STOP_SECONDS - idle, 0)
            tell(
                f"{name}: {self._where()}: {what}{ended}; if that does not lead to an end in "
                f"order, the run is cut in {left:.0f} s at most, or by a second signal "
                f"({self._saved()})"
            )
        if blocker is not None:
            error = RunInterrupted(f"{name} while {what}", signal=self.number)
            stalls.end_blocking(self._loop, self._main, blocker, error)

    def _cut(self, why: str) -> None:
        what = "" if self._taken else f": {stalls.blocking(self._loop, self._main)}"
        tell(f"{why}: the run is cut in {self._where()}{what}; {self._saved()}")
        assert self.number is not None
        end_now(128 + self.number)


_open: list[Signals] = []
"""Contexts that are entered."""


def install_again() -> None:
    """Put the handlers back that a library has replaced in C, past Python's books: those of Ray
    print the stack of a healthy process."""
    if threading.current_thread() is threading.main_thread():
        for signals in _open:
            signals._install()


def _forget() -> None:
    """In a forked child the parent's handlers would tell the parent of signals to the child."""
    if _open:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _open.clear()


os.register_at_fork(after_in_child=_forget)


def stopped_by(number: int | None) -> str:
    """How a signal is named to the user."""
    if number is None or number == signal.SIGINT:
        return "stopped by Ctrl-C"
    return f"stopped by {signal.Signals(number).name}"


def tell(text: str) -> None:
    """Write to standard error past Python's files, whose locks a blocked thread may hold; returns
    soon, also where it is a pipe that is full, which may be what blocks the run."""

    def write() -> None:
        with suppress(OSError):
            os.write(2, f"{text}\n".encode(errors="replace"))

    writer = threading.Thread(target=write, name="rlx-tell", daemon=True)
    writer.start()
    writer.join(_TELLING)


def end_now(code: int) -> Any:
    """Leave without waiting for anything; the last checkpoint on disk is whole."""
    end_descendants()
    os._exit(code)
