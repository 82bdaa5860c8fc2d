"""Tells trackers what happens; one that fails is switched off with a warning, the run goes on."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.calls import Call
from rlx.core.component import Bound
from rlx.core.detached import detached
from rlx.core.engine.logs import DriverLog
from rlx.core.run import Run


class Reporter:
    """Fan-out to the selected trackers, and to the driver's log.

    A tracker has `log(step, metrics)` and `close(error)`; `start(run)`, `status(text)` and
    `log_samples(step, records)` are optional.
    """

    def __init__(self, trackers: Sequence[Bound], *, log: DriverLog | None = None) -> None:
        self._trackers = list(trackers)
        self._log = log

    def start(self, run: Run) -> None:
        self._tell("start", run)

    def status(self, text: str) -> None:
        """Say what the run is waiting for (`starting the engine`)."""
        self._tell("status", text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("log", step, metrics)

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._tell("log_samples", step, records)

    def close(self, error: BaseException | None = None) -> None:
        self._tell("close", error)

    def _tell(self, method: str, *args: Any) -> None:
        if (function := getattr(self._log, method, None)) is not None:
            function(*args)
        for tracker in list(self._trackers):
            function = getattr(tracker.instance, method, None)
            if function is None:
                continue
            try:
                with Call(f"tracker {tracker.name!r} in {method}()", observer=True):
                    function(*map(detached, args))
            except (Exception, SystemExit) as error:
                self._trackers.remove(tracker)
                warnings.warn(
                    f"tracker '{tracker.name}' failed in {method}() and is off for the rest of the "
                    f"run: {type(error).__name__}: {error}",
                    stacklevel=2,
                )
