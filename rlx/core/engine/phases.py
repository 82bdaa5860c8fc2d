"""The phases of a step: which one a run is at, and how long each took."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.core.engine.fault_ledger import FaultLedger
from rlx.core.engine.monitor import Monitor


class Phases:
    """Tells the trace of each phase that ends, and the fault ledger of each that begins."""

    def __init__(self, monitor: Monitor, faults: FaultLedger) -> None:
        self._monitor = monitor
        self._faults = faults
        self._current = "idle"
        self.times: dict[str, float] = {}
        """Seconds of each phase since `begin`."""
        self._started = time.perf_counter()

    @property
    def current(self) -> str:
        """The phase under way; after an error the one that it was raised in."""
        return self._current

    @current.setter
    def current(self, phase: str) -> None:
        self._current = phase
        if phase != "idle":
            self._faults.phase = phase

    def begin(self) -> None:
        """A step begins."""
        self._faults.phase = "begin"
        self.times = {}
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the step began."""
        return time.perf_counter() - self._started

    @contextmanager
    def timed(self, phase: str, *, step: int) -> Iterator[None]:
        """`step`: the last finished one."""
        self.current = phase
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        self.times[phase] = self.times.get(phase, 0.0) + seconds
        self._monitor.phase(phase, seconds, step=step)
