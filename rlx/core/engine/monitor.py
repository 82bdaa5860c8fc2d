"""What a run's processes are doing, looked at once a step, beside what the step itself reports."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

from rlx.core.engine.metrics import merge
from rlx.core.engine.trace import Span, Trace

Source: TypeAlias = Callable[[], Awaitable[Mapping[str, float]]]
_PATIENCE = 5.0
"""Seconds after which a source that does not answer is left out of a step."""
_PHASES = "driver"


class Monitor:
    """Metrics of processes, and the run's trace.

    Args:
        sources: each gives metrics of what happened since its last call. One that fails or hangs is
            left out of the step: whoever needs that process will say what is wrong with it.
    """

    def __init__(self, trace: Trace, sources: Sequence[Source] = ()) -> None:
        self.trace = trace
        self._sources = list(sources)

    async def take(self) -> dict[str, float]:
        """Metrics since the last call."""
        asked = (asyncio.wait_for(source(), _PATIENCE) for source in self._sources)
        found = await asyncio.gather(*asked, return_exceptions=True)
        return merge(*(one for one in found if not isinstance(one, BaseException)))

    def phase(self, name: str, seconds: float, *, step: int) -> None:
        """Note a phase of the driver that has just ended."""
        now = time.time()
        self.trace.add(_PHASES, Span(name, now - seconds, now), step=step)

    def update(self, spans: Sequence[Span]) -> None:
        """Note what the learner did in an update."""
        self.trace.add_all("learner", spans)

    def step(self, number: int, seconds: float) -> None:
        """Note a step that has just ended, and let others read the trace up to here."""
        now = time.time()
        self.trace.add("steps", Span(f"step {number}", now - seconds, now))
        self.trace.flush()
