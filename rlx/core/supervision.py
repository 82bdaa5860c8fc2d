"""Keeps an agent within its time, so that one that hangs costs its episode and not the run."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from rlx.core.episode import Episode, EpisodeEnded
from rlx.core.errors import ComponentError
from rlx.core.stalls import Watched, begin

T = TypeVar("T")

_GRACE = 5.0
"""Seconds that a cancelled agent has for its own clean-up."""

log = logging.getLogger(__name__)


async def supervised(work: Coroutine[Any, Any, T], episode: Episode, *, name: str) -> T:
    """Await `work`, which drives the episode, for as long as the episode's limits allow.

    Raises:
        EpisodeEnded: the wall time is over (`timeout`).
        ComponentError: the agent took too long between two engine calls, or ended by `sys.exit()`
            or by cancelling itself.
    """
    deadline = time.monotonic() + (episode.limits.max_seconds or float("inf"))
    task = asyncio.ensure_future(_no_exit(work))
    timeout = episode.limits.step_timeout or float("inf")
    with Watched(task, name=name, task=episode.task.id, timeout=timeout):
        try:
            while not task.done():
                await _wait(task, episode, _patience(episode, deadline))
                _check_time(task, episode, deadline)
        finally:
            if not task.done():
                await _give_up(task, episode, name)
    if task.cancelled():
        raise ComponentError("it cancelled itself")
    return task.result()


async def _wait(task: asyncio.Task[Any], episode: Episode, seconds: float | None) -> None:
    """Wait for the task; time in which another agent blocked the event loop does not count."""
    started = time.monotonic()
    await _ended(task, seconds)
    late = 0.0 if seconds is None else time.monotonic() - started - seconds
    if late > 0 and episode.agent_since is not None:
        episode.agent_since += late


async def _ended(task: asyncio.Task[Any], seconds: float | None) -> None:
    """`asyncio.wait({task}, timeout=seconds)` with half its work and objects: each episode waits
    here for as long as it lasts, a hundred thousand of them at once."""
    loop = asyncio.get_running_loop()
    woken = loop.create_future()

    def wake(_: object = None) -> None:
        if not woken.done():
            woken.set_result(None)

    task.add_done_callback(wake)
    timer = None if seconds is None else loop.call_later(seconds, wake)
    try:
        await woken
    finally:
        task.remove_done_callback(wake)
        if timer is not None:
            timer.cancel()


def _check_time(task: asyncio.Task[Any], episode: Episode, deadline: float) -> None:
    if task.done():
        return
    if time.monotonic() >= deadline:
        raise EpisodeEnded("timeout")
    if _overdue(episode):
        raise ComponentError(
            f"it took longer than {episode.limits.step_timeout:g} s between two engine calls "
            "(episode.step_timeout)"
        )


async def _no_exit(work: Coroutine[Any, Any, T]) -> T:
    """A task that raises SystemExit would end the event loop, and with it the run."""
    begin()
    try:
        return await work
    except SystemExit as error:
        raise ComponentError(f"it called sys.exit({error.code!r})") from error


def _patience(episode: Episode, deadline: float) -> float | None:
    """Seconds until the next moment at which time could be over; None where there is no limit."""
    now = time.monotonic()
    step = episode.limits.step_timeout
    wait = deadline - now
    if step is not None:
        since = now if episode.agent_since is None else episode.agent_since
        wait = min(wait, since + step - now)
    return None if math.isinf(wait) else max(wait, 0.001)


def _overdue(episode: Episode) -> bool:
    step, since = episode.limits.step_timeout, episode.agent_since
    return step is not None and since is not None and time.monotonic() >= since + step


async def _give_up(task: asyncio.Task[Any], episode: Episode, name: str) -> None:
    """Cancel the agent; one that doesn't end of it is left behind and gets no engine call more."""
    episode.end("abort")
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE)
    task.add_done_callback(_forget)
    if not task.done():
        log.warning("agent %r goes on in task %s after it was cancelled", name, episode.task.id)


def _forget(task: asyncio.Task[Any]) -> None:
    """Take the exception that nobody waits for any more."""
    if not task.cancelled():
        task.exception()
