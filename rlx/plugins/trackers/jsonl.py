"""`metrics.jsonl` and `rollouts/`: the files that every run has."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from rlx.core.run import METRICS_NAME, Run


class Jsonl:
    """Writes one JSON object a step to `metrics.jsonl`, sampled rollouts to `rollouts/`.

    A number that is not finite becomes `null`, because JSON has no NaN. Rollouts have one file a
    step, so that a resumed run replaces the steps it does again; at
    `logging.rollouts_max_mib` for the whole folder no more are written, which
    `rollouts/FULL` then says.
    """

    def __init__(self) -> None:
        self._metrics: IO[str] | None = None
        self._rollouts: Path | None = None
        self._budget = 0.0

    def start(self, run: Run) -> None:
        self._metrics = (run.folder / METRICS_NAME).open("a", encoding="utf-8")
        self._rollouts = run.folder / "rollouts"
        self._rollouts.mkdir(exist_ok=True)
        written = sum(path.stat().st_size for path in self._rollouts.glob("*.jsonl"))
        self._budget = run.config.logging.rollouts_max_mib * 2**20 - written

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        assert self._metrics is not None
        record = {"step": step, "time": time.time(), **metrics}
        self._metrics.write(_line(record))
        self._metrics.flush()

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        assert self._rollouts is not None
        text = "".join(_line({"step": step, **record}) for record in records)
        if len(text) > self._budget:
            (self._rollouts / "FULL").touch()
            return
        self._budget -= len(text)
        path = self._rollouts / f"step-{step:06d}.jsonl"
        # Half of a surrogate pair, which UTF-8 can't hold, becomes its escape in JSON.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")

    def close(self, error: BaseException | None = None) -> None:
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_finite(record), ensure_ascii=False, default=str) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
