"""What goes into a run's `logs/`: a file for the driver, and one for each worker under Ray."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rlx.core.log_lines import DRIVER_LOG, LOGS_NAME, formatter
from rlx.core.run import Run

_SHOWN = ("reward/mean", "train/loss", "time/step")


class DriverLog:
    """Writes what the driver waits for, steps and the end to `logs/driver.log`; takes a tracker's
    place. What can't be written is not: the trackers complain about a full disk."""

    def __init__(self) -> None:
        self._log = logging.getLogger("rlx.driver")
        self._handler: logging.Handler | None = None

    def start(self, run: Run) -> None:
        folder = run.folder / LOGS_NAME
        with suppress(OSError):
            handler = logging.FileHandler(folder / DRIVER_LOG, encoding="utf-8", errors="replace")
            handler.setFormatter(formatter())
            handler.handleError = lambda record: None  # type: ignore[method-assign]
            self._handler = handler
            self._log.addHandler(handler)
            self._log.setLevel(logging.INFO)
            self._log.propagate = False
        self.status(f"process {os.getpid()}: {' '.join(sys.argv)}")

    def status(self, text: str) -> None:
        if self._handler is not None:
            self._log.info(text)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = ", ".join(f"{name} {metrics[name]:.4g}" for name in _SHOWN if name in metrics)
        self.status(f"step {step}: {shown}")

    def close(self, error: BaseException | None = None) -> None:
        if self._handler is None:
            return
        if error is not None:
            self._log.error("the run ended with an error", exc_info=error)
        else:
            self._log.info("the run ended")
        self._log.removeHandler(self._handler)
        self._handler.close()
        self._handler = None


def open_worker_log(path: str | None) -> None:
    """Send a worker process's output to the run's `logs/`, where it can be; else Ray keeps it.

    Python's log records and warnings get a time and a level there.
    """
    if path is None or not Path(path).parent.is_dir():
        return
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter())
    logging.getLogger().addHandler(handler)
    logging.getLogger("rlx").setLevel(logging.INFO)
    logging.captureWarnings(True)
