"""`rlx runs logs`: what driver and workers of a run said, in one place and in the order of time."""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlx.core.errors import UsageError, did_you_mean
from rlx.core.log_lines import LOGS_NAME, LogLine, read_lines

_POLL = 0.5
"""Seconds between two looks."""


def find_logs(folder: Path, workers: Sequence[str]) -> list[Path]:
    """The log files of a run, or those of some workers.

    Raises:
        UsageError: there are none, or none of that name.
    """
    found = {path.stem: path for path in sorted((folder / LOGS_NAME).glob("*.log"))}
    if not found:
        raise UsageError(f"{folder} holds no logs", fix="a run writes them from its first moment")
    for worker in workers:
        if worker not in found:
            raise UsageError(
                f"no worker {worker!r} has a log",
                where="--worker",
                fix=did_you_mean(worker, found) or f"one of: {', '.join(found)}",
            )
    return [found[worker] for worker in workers] if workers else list(found.values())


def last_lines(paths: Sequence[Path], count: int) -> list[LogLine]:
    """The last lines of all logs together, by time."""
    logs = [list(read_lines(path.stem, _read(path))) for path in paths]
    merged = heapq.merge(*logs, key=lambda line: line.time)
    return list(merged)[-count:]


def new_lines(folder: Path, workers: Sequence[str]) -> Iterator[LogLine]:
    """Lines that are written from now on, for ever; logs that come later are followed too."""
    return _follow(
        folder, workers, {path: path.stat().st_size for path in find_logs(folder, workers)}
    )


def _follow(folder: Path, workers: Sequence[str], places: dict[Path, int]) -> Iterator[LogLine]:
    while True:
        for path in find_logs(folder, workers):
            text, places[path] = _read_on(path, places.get(path, 0))
            yield from read_lines(path.stem, text)
        time.sleep(_POLL)


def _read(path: Path) -> str:
    return path.read_bytes().decode("utf-8", "replace")


def _read_on(path: Path, start: int) -> tuple[str, int]:
    """Whole lines from `start` on, and where the next one begins."""
    with path.open("rb") as file:
        file.seek(start)
        data = file.read()
    end = data.rfind(b"\n") + 1
    return data[:end].decode("utf-8", "replace"), start + end
