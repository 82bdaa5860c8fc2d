"""Which of a run's components a thread is in, and how a call that never returns is ended.

Every call of a component on an event loop is made in a `Call`, which says who it is. Threads that
watch the loop (`stalls`, the session's signals) read it, and end it by `Call.end`: an exception in
the thread that made the call, which leaves it as the error that they chose.

In the main thread the exception is raised by the handler of a signal (SIGURG, which is ignored by
default): a system call that waits, such as that of `time.sleep`, ends by it, and the handler sees
whether the very same call is still under way. In other threads it is raised between two bytecodes,
so a call that blocks in C first has to return.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from rlx.core.errors import ComponentError

_SIGNAL = signal.SIGURG
_under_way: dict[int, Call] = {}
"""Thread → the outermost call in it."""
_wanted: Callable[[FrameType | None], type[BaseException] | None] | None = None
"""What the signal's handler raises in the main thread, by the frame that it interrupts."""


class OverdueError(ComponentError):
    """A component's call in the driver took longer than `faults.component_timeout`."""

    weights_changed = False  # the driver's components run beside updates, not in them


class CallEnded(BaseException):
    """Raised inside of a call to end it; whoever called sees the error that was chosen."""


class Call:
    """A context in which a component runs without awaiting anything.

    Inside of another call of the same thread it is a part of that one.

    Args:
        who: the component, for messages: "sampler 'dapo' in keep()".
        observer: one that is switched off when it fails, and the run goes on.
    """

    __slots__ = ("_thread", "error", "maker", "observer", "who")

    def __init__(self, who: str, *, observer: bool = False) -> None:
        self.who = who
        self.observer = observer
        self.error: Exception | None = None
        """What the call is to be ended with."""
        self.maker: CodeType | None = None
        """Of the function that made the call."""
        self._thread: int | None = None

    def __enter__(self) -> Call:
        thread = threading.get_ident()
        if thread not in _under_way:
            self.maker = sys._getframe(1).f_code
            self._thread = thread
            _under_way[thread] = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        del _under_way[self._thread]
        if self.error is not None and raised is not None:
            raise self.error from raised

    def is_under_way(self, thread: int) -> bool:
        """Whether this is what a thread is in."""
        return _under_way.get(thread) is self

    def end(self, thread: int, error: Exception) -> None:
        """Try to end the call with an error; where it goes on (it caught that, or is in C that no
        signal ends), try again later."""

        def raised(frame: FrameType | None) -> type[BaseException] | None:
            inside = frame is not None and frame.f_code not in _OWN
            return CallEnded if inside and self.is_under_way(thread) else None

        self.error = error
        if self.is_under_way(thread):
            raise_in(thread, CallEnded, raised)


_OWN = frozenset({Call.__enter__.__code__, Call.__exit__.__code__})
"""Where an exception would leave the books wrong."""


def under_way(thread: int) -> Call | None:
    """The call that a thread is in."""
    return _under_way.get(thread)


def raise_in(
    thread: int,
    error: type[BaseException],
    choose: Callable[[FrameType | None], type[BaseException] | None],
) -> None:
    """Raise an exception in another thread.

    Args:
        error: where it can only be raised between two bytecodes.
        choose: asked in the thread itself, where that is possible; None: raise nothing.
    """
    global _wanted
    if thread == threading.main_thread().ident and signal.getsignal(_SIGNAL) is _on_signal:
        _wanted = choose
        signal.pthread_kill(thread, _SIGNAL)
    else:
        number, what = ctypes.c_ulong(thread), ctypes.py_object(error)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(number, what)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let `raise_in` end system calls of the main thread, which has to enter this."""
    before = signal.signal(_SIGNAL, _on_signal)
    try:
        yield
    finally:
        signal.signal(_SIGNAL, before)


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _wanted
    wanted, _wanted = _wanted, None
    if wanted is not None and (error := wanted(frame)) is not None:
        raise error


def place(call: Call, thread: int) -> str:
    """Where a call is, in the component's own file (`hang.py:7 in never`); empty where its thread
    has left it, or it is in no Python code."""
    inside = _inside(call, thread)
    if not inside:
        return ""
    file = inside[-1].f_code.co_filename
    own = next(frame for frame in inside if frame.f_code.co_filename == file)
    return f"{Path(file).name}:{own.f_lineno} in {own.f_code.co_name}"


def stack(call: Call, thread: int) -> str:
    """The component's part of a thread's stack, as a traceback has it; empty as above."""
    inside = [(frame, frame.f_lineno) for frame in reversed(_inside(call, thread))]
    return "".join(traceback.StackSummary.extract(inside).format()).rstrip()


def _inside(call: Call, thread: int) -> list[FrameType]:
    """The frames of a call, the innermost first."""
    inside: list[FrameType] = []
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code is not call.maker:
        inside.append(frame)
        frame = frame.f_back
    while inside and _is_core(inside[-1]):
        inside.pop()
    return inside if frame is not None else []


def _is_core(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).startswith("rlx.core.")
