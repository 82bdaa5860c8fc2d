"""Many tasks, some at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

_WAVE = 4096
"""Rollouts that are handed to the engine at a time, which bounds the driver's memory."""

T = TypeVar("T")
R = TypeVar("R")


async def in_waves(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], *, rollouts: int
) -> list[R]:
    """Await `work` for all items, a wave of them at a time, and return what it gave, in order.

    A wave starts together, so what the engine runs at once depends on the items alone.

    Args:
        rollouts: that the work for one item asks for.
    """
    size = max(_WAVE // rollouts, 1)
    found: list[R] = []
    for start in range(0, len(items), size):
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(_run(work, item)) for item in items[start : start + size]]
        found += [task.result() for task in tasks]
    return found


async def _run(work: Callable[[T], Awaitable[R]], item: T) -> R:
    return await work(item)
