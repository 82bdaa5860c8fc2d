"""Notices what blocks an event loop, names it and ends it: an agent, or another component's call.

An `async def` agent that never awaits (an endless loop, a request without time-out) stops every
other episode; an estimator or a tracker that never returns stops the run. A thread therefore looks
at the loops. It says who has blocked one for 10 s, and where; after the agent's or the run's
time-out it raises an exception in that code (`calls`).

Only time in which this thread itself ran counts, and none in which the loop is in a debugger.

The thread (`_watch`)
  consumes:      the agents and runs that are watched, the calls that are under way
  waits for:     `_INTERVAL`
  unblocked by:  nothing; it ends when nothing is watched
  produces:      log messages, `AgentBlockedError` in the loop's thread, a thread for each call that
                 is to be ended (`overdue`)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rlx.core import calls
from rlx.core.calls import Call, CallEnded
from rlx.core.overdue import Driven, end_call

_INTERVAL = 0.2
_MOST = 1.0
"""Seconds that may pass between two looks and still count."""
_WARN_AFTER = 10.0
"""Seconds without a sign of life after which the log says who is to blame."""
_WARN_OF_OURS = 60.0
"""The same where it is neither an agent nor a component."""
_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "debugpy", "pydevd", "_pydevd_bundle"})

log = logging.getLogger(__name__)


class AgentBlockedError(Exception):
    """Raised in an agent that blocked the event loop for longer than its time-out."""

    def __str__(self) -> str:
        return (
            "it blocked the event loop for longer than episode.step_timeout: await what takes "
            "time, or write a step without `async`, which runs in a thread"
        )


@dataclass(slots=True)
class _Loop:
    thread: int
    agents: dict[asyncio.Task[Any], Watched] = field(default_factory=dict)
    run: Driven | None = None
    looked: float = field(default_factory=time.monotonic)
    asked: bool = False
    """Whether it was asked for a sign of life that has not come yet."""
    silent: float = 0.0
    """Seconds since then, or since it was seen to go on."""
    job: asyncio.Task[Any] | None = None
    """What it was at when it was looked at last."""
    warned: bool = False
    reported: bool = False
    """Whether stacks were written, of a loop that neither agent nor component blocks."""
    call: Call | None = None
    """The call of the last look."""
    held: float = 0.0
    """Seconds that it has taken."""
    named: bool = False
    """Whether the log has named it."""
    ending: bool = False
    """Whether a thread is at ending it."""


_lock = threading.Lock()
_loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
_running = False
_owner: contextvars.ContextVar[weakref.ref[asyncio.Task[Any]] | None] = contextvars.ContextVar(
    "rlx_agent", default=None
)
"""The agent's task, in it and in every task that it starts. Weak, as a task holds its context: each
episode would leave a cycle with all that its task holds to the garbage collector."""


def begin() -> None:
    """Called in an agent's task: what it starts from now on is the agent's too."""
    job = asyncio.current_task()
    _owner.set(None if job is None else weakref.ref(job))


class NotTheAgents:
    """What is started in this context, the engine's work for example, is no agent's."""

    __slots__ = ("_token",)

    def __enter__(self) -> None:
        self._token = _owner.set(None)

    def __exit__(self, *error: object) -> None:
        _owner.reset(self._token)


class Watched:
    """An agent's task of the running loop, which is watched while the context is open.

    Args:
        name: of the agent.
        task: id of the task that it works on.
        timeout: seconds for which it may block the loop.
    """

    __slots__ = ("_job", "_loop", "name", "task", "timeout")

    def __init__(self, job: asyncio.Task[Any], *, name: str, task: str, timeout: float) -> None:
        self._job = job
        self._loop = asyncio.get_running_loop()
        self.name = name
        self.task = task
        self.timeout = timeout

    def __str__(self) -> str:
        return f"agent {self.name!r} in task {self.task}"

    def __enter__(self) -> None:
        with _lock:
            _watched(self._loop).agents[self._job] = self

    def __exit__(self, *error: object) -> None:
        with _lock:
            del _loops[self._loop].agents[self._job]
            _forget(self._loop)


@contextlib.contextmanager
def driven(run: Driven) -> Iterator[None]:
    """Watch the calls of a run's components on the running loop while the context is open."""
    loop = asyncio.get_running_loop()
    with _lock:
        _watched(loop).run = run
    try:
        yield
    finally:
        with _lock:
            _loops[loop].run = None
            _forget(loop)


def _watched(loop: asyncio.AbstractEventLoop) -> _Loop:
    """What is known of a loop, which runs in this thread; it is looked at from now on."""
    global _running
    if (state := _loops.get(loop)) is None:
        state = _loops[loop] = _Loop(threading.get_ident())
    if not _running:
        _running = True
        threading.Thread(target=_watch, name="rlx-stalls", daemon=True).start()
    return state


def _forget(loop: asyncio.AbstractEventLoop) -> None:
    state = _loops[loop]
    if not state.agents and state.run is None:
        del _loops[loop]


def blocking(loop: asyncio.AbstractEventLoop, thread: int) -> str:
    """What a loop that does not answer, and runs in `thread`, is at, as a clause."""
    call = calls.under_way(thread)
    if call is not None:
        at = calls.place(call, thread)
        return f"{call.who} has not returned{at and f'; it is at {at}'}"
    _, agent = _blocked_by(loop, thread)
    return f"{agent} has not returned" if agent else "the driver is busy"


def blocker(loop: asyncio.AbstractEventLoop, thread: int) -> Call | asyncio.Task[Any] | None:
    """The component's call or the agent that a loop, which runs in `thread`, is in."""
    call = calls.under_way(thread)
    if call is not None:
        return call
    job, agent = _blocked_by(loop, thread)
    return job if agent is not None else None


def end_blocking(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    what: Call | asyncio.Task[Any],
    error: Exception,
) -> None:
    """Try to end a component's call with `error`, or an agent with `CallEnded`."""
    if isinstance(what, Call):
        what.end(thread, error)
    else:
        _end_agent(loop, thread, what, CallEnded)


def _watch() -> None:
    global _running
    while True:
        time.sleep(_INTERVAL)
        with _lock:
            if not _loops:
                _running = False
                return
            for loop, state in list(_loops.items()):
                _look(loop, state)


def _look(loop: asyncio.AbstractEventLoop, state: _Loop) -> None:
    now = time.monotonic()
    passed, state.looked = min(now - state.looked, _MOST), now
    before, state.job = state.job, _job_of(loop, state.thread)
    call = calls.under_way(state.thread)
    if call is not state.call:
        state.call, state.held = call, 0.0
        state.named = state.ending = False
    if not state.asked:
        _ask(loop, state)
        return
    if _is_debugged(state.thread):
        return
    if state.job is not before:
        # One turn of a loop of very many episodes takes seconds, and nobody in it is to blame.
        state.silent, state.warned = 0.0, False
        return
    state.silent += passed
    state.held += passed
    if call is not None:
        _look_at_call(loop, state, call)
    elif state.agents:
        _look_at_agents(loop, state)
    elif state.run is not None:
        _look_at_ours(loop, state, state.run)


def _ask(loop: asyncio.AbstractEventLoop, state: _Loop) -> None:
    def alive() -> None:
        state.asked = state.warned = state.reported = False

    state.asked, state.silent = True, 0.0
    with contextlib.suppress(RuntimeError):  # the loop has closed
        loop.call_soon_threadsafe(alive)


def _look_at_call(loop: asyncio.AbstractEventLoop, state: _Loop, call: Call) -> None:
    run = state.run
    if state.held >= _WARN_AFTER and not state.named:
        state.named = True
        blocked = f"{call.who} has not returned for {state.held:.0f} s, and all else waits"
        ends = f" (ended after {run.timeout:g} s)" if run is not None and run.ends else ""
        _warn(run, f"{blocked}{ends}:\n{calls.stack(call, state.thread)}")
    if run is not None and state.held >= run.timeout and not state.ending:
        state.ending = True
        threading.Thread(
            target=end_call, args=(loop, state.thread, call, run), name="rlx-overdue", daemon=True
        ).start()


def _look_at_agents(loop: asyncio.AbstractEventLoop, state: _Loop) -> None:
    job, agent = _blocked_by(loop, state.thread)
    if state.silent >= _WARN_AFTER and not state.warned:
        state.warned = True
        blocked = f"{agent or 'something'} has blocked all episodes for {state.silent:.0f} s"
        _warn(state.run, f"{blocked}:\n{_stack(state.thread)}")
    if agent is not None and state.silent >= agent.timeout:
        _end_agent(loop, state.thread, job, AgentBlockedError)
        state.asked = False


def _look_at_ours(loop: asyncio.AbstractEventLoop, state: _Loop, run: Driven) -> None:
    """Nothing is ended where neither agent nor component runs: a large step takes its time."""
    what = f"the driver has not got on for {state.silent:.0f} s"
    if state.silent >= _WARN_OF_OURS and not state.warned:
        state.warned = True
        _warn(run, f"{what}:\n{_stack(state.thread)}")
    if state.silent >= run.timeout and not state.reported:
        state.reported = True

        def report() -> None:
            run.tell(f"{run.where}: {what}{run.write_stacks(loop)}")

        threading.Thread(target=report, name="rlx-overdue", daemon=True).start()


def _warn(run: Driven | None, text: str) -> None:
    if run is None:
        log.warning("%s", text)
    else:
        run.tell(f"{run.where}: {text}")


def _blocked_by(
    loop: asyncio.AbstractEventLoop, thread: int
) -> tuple[asyncio.Task[Any] | None, Watched | None]:
    """The agent whose task, or callback, a loop's thread is in."""
    state = _loops.get(loop)
    job = _job_of(loop, thread)
    return job, state.agents.get(job) if state is not None and job is not None else None


def _job_of(loop: asyncio.AbstractEventLoop, thread: int) -> asyncio.Task[Any] | None:
    return _owner_in(sys._current_frames().get(thread)) or asyncio.current_task(loop)


def _owner_in(frame: FrameType | None) -> asyncio.Task[Any] | None:
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            context: contextvars.Context = frame.f_locals["self"]._context
            owner = context.get(_owner)
            return None if owner is None else owner()
        frame = frame.f_back
    return None


def _end_agent(
    loop: asyncio.AbstractEventLoop,
    thread: int,
    job: asyncio.Task[Any] | None,
    error: type[BaseException],
) -> None:
    def raised(frame: FrameType | None) -> type[BaseException] | None:
        return error if (_owner_in(frame) or asyncio.current_task(loop)) is job else None

    calls.raise_in(thread, error, raised)


def _is_debugged(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame, limit=6)).rstrip() if frame is not None else ""
