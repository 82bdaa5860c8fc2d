"""What went wrong and was mended: counted against its limits, told, and written to `faults.jsonl`.

Each line of the file is `{"time", "step", "phase", "fault", "worker", "cause", "action"}`.
"""

from __future__ import annotations

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FAULTS_NAME = "faults.jsonl"
_ENDS_A_STEP = ("publish", "eval", "checkpoint", "emit")
"""Phases of the step whose update is done."""
log = logging.getLogger(__name__)


class FaultLedger:
    """Counts since the last step that was finished for the first time.

    Args:
        folder: of the run.
        status: told what is done about a fault.
    """

    def __init__(self, folder: Path, status: Callable[[str], None]) -> None:
        self._path = folder / FAULTS_NAME
        self._status = status
        self._highest = 0
        self._since_step: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self.step = 0
        """Last step whose update is done."""
        self.phase = "start"
        """What the run is at."""

    @property
    def where(self) -> str:
        """The step and the phase that the run is at, for messages."""
        return f"step {self._under_way}, {self.phase}"

    @property
    def _under_way(self) -> int:
        return self.step if self.phase in _ENDS_A_STEP else self.step + 1

    def finished(self, step: int) -> None:
        """A step is done; steps that a restart does again don't count as getting on."""
        self.step = step
        if step > self._highest:
            self._highest = step
            self._since_step.clear()

    def allows(self, kind: str, limit: int) -> bool:
        """Whether one more fault of a kind may be mended."""
        return self._since_step[kind] < limit

    def note(self, kind: str, *, cause: str, action: str, worker: str | None = None) -> None:
        """Count a fault that is mended, and say so.

        Args:
            kind: the metric's name after `faults/`.
            action: what is done, as a participle (`starting it anew`).
        """
        self._since_step[kind] += 1
        self._unreported[kind] += 1
        self._status(f"{self.where}: {cause}: {action}")
        self.write(kind, cause=cause, action=action, worker=worker)

    def write(self, kind: str, *, cause: str, action: str, worker: str | None = None) -> None:
        """Add a line to `faults.jsonl`; a disk that is full must not be a second fault."""
        record: Mapping[str, Any] = {
            "time": time.time(),
            "step": self._under_way,
            "phase": self.phase,
            "fault": kind,
            "worker": worker,
            "cause": cause,
            "action": action,
        }
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
        except OSError as error:
            log.warning("can't write %s: %s", self._path, error)

    def take_metrics(self) -> dict[str, float]:
        """`faults/<kind>` since the last call; empty when nothing happened."""
        metrics = {f"faults/{kind}": float(count) for kind, count in self._unreported.items()}
        self._unreported.clear()
        return metrics
