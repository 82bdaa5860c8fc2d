"""Notices an agent that blocks the event loop, on which all episodes run, names it and ends it.

An `async def` agent that never awaits (an endless loop, a request without time-out) stops every
other episode, and Ctrl-C too. A thread therefore asks the loop for a sign of life; where none comes
it says where the agent is, and after its time-out raises an exception in it. Python code is ended
by that; a call that blocks in C first has to return.

The thread (`_watch`)
  consumes:      the agents that run
  waits for:     `_INTERVAL`
  unblocked by:  nothing; it ends when no agent runs
  produces:      log messages, `AgentBlockedError` in the loop's thread
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import logging
import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass, field
from typing import Any

_INTERVAL = 0.2
_WARN_AFTER = 10.0
"""Seconds without a sign of life after which the log says who is to blame."""

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
    asked: float | None = None
    """When the loop was asked for a sign of life that has not come yet, or was seen to go on."""
    job: asyncio.Task[Any] | None = None
    """What it was at when it was looked at last."""
    warned: bool = False


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

    def __enter__(self) -> None:
        global _running
        with _lock:
            if (state := _loops.get(self._loop)) is None:
                state = _loops[self._loop] = _Loop(threading.get_ident())
            state.agents[self._job] = self
            if not _running:
                _running = True
                threading.Thread(target=_watch, name="rlx-stalls", daemon=True).start()

    def __exit__(self, *error: object) -> None:
        with _lock:
            state = _loops[self._loop]
            del state.agents[self._job]
            if not state.agents:
                del _loops[self._loop]


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
    before, state.job = state.job, _owner_of(state.thread) or asyncio.current_task(loop)
    if state.asked is None:
        state.asked = now

        def alive() -> None:
            state.asked, state.warned = None, False

        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(alive)
        return
    if state.job is not before:
        # One turn of a loop of very many episodes takes seconds, and nobody in it is to blame.
        state.asked, state.warned = now, False
        return
    silent = now - state.asked
    agent = state.agents.get(state.job) if state.job is not None else None
    if silent >= _WARN_AFTER and not state.warned:
        state.warned = True
        who = f"agent {agent.name!r} in task {agent.task}" if agent else "something"
        log.warning(
            "%s has blocked all episodes for %.0f s:\n%s", who, silent, _place(state.thread)
        )
    if agent is not None and silent >= agent.timeout:
        blocked = ctypes.py_object(AgentBlockedError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(state.thread), blocked)
        state.asked = None


def _owner_of(thread: int) -> asyncio.Task[Any] | None:
    """The agent whose task, or callback, a loop's thread is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is asyncio.Handle._run.__code__:
            context: contextvars.Context = frame.f_locals["self"]._context
            owner = context.get(_owner)
            return None if owner is None else owner()
        frame = frame.f_back
    return None


def _place(thread: int) -> str:
    frame = sys._current_frames().get(thread)
    return "".join(traceback.format_stack(frame, limit=6)) if frame is not None else ""
