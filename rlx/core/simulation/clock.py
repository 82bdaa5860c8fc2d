"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, seconds: float, action: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, action, args))

    def run(self, until: Callable[[], bool]) -> None:
        """Let things happen until `until()`; raises RuntimeError when nothing is left to."""
        while not until():
            if not self._events:
                raise RuntimeError("nothing is left to happen")
            self.now, _, action, args = heapq.heappop(self._events)
            action(*args)
