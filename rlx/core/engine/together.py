"""Calls that all ranks of a group answer together, and whose error is told when they don't."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any

from rlx.core.errors import RlxError, WorkerLostError

_GRACE = 10.0
"""Seconds in which the death of a rank becomes known after its peers have failed of it."""


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await the calls and return their answers, in order.

    A rank whose peer died or hangs fails too, with whatever its collective operation says, and
    often first. So when a rank fails with an error that is not rlx's own, the others get a moment,
    and the loss of a worker is raised before its consequences.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(call) for call in calls]
    try:
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        first = _first_error(task for task in tasks if task in done)
        if first is None:
            return [task.result() for task in tasks]
        if others and not isinstance(first, RlxError):
            await asyncio.wait(others, timeout=_GRACE)
        errors = [error for task in tasks if (error := _error(task)) is not None]
        raise next((one for one in errors if isinstance(one, WorkerLostError)), first)
    finally:
        for task in tasks:
            task.cancel()


def _first_error(tasks: Iterable[asyncio.Future[Any]]) -> BaseException | None:
    return next((error for task in tasks if (error := _error(task)) is not None), None)


def _error(task: asyncio.Future[Any]) -> BaseException | None:
    return task.exception() if task.done() and not task.cancelled() else None
