"""Waiting in turns of the event loop, which a busy machine does not change."""

from __future__ import annotations

import asyncio


async def turns(count: int = 50) -> None:
    """Let everything that is ready, and what that makes ready, go on."""
    for _ in range(count):
        await asyncio.sleep(0)
