"""`trace.json`: what the run was doing when, in Chrome's trace format (Perfetto opens it).

The file is a JSON array with one event a line and no closing bracket, which the format allows: it
is valid at any moment, after a kill too. Times are microseconds since the epoch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

TRACE_NAME = "trace.json"
_PROCESS = 1


class Span(NamedTuple):
    """Something that took time; picklable, so that workers can tell of theirs."""

    name: str
    start: float
    """Seconds since the epoch."""
    end: float


class Trace:
    """Appends spans to a run's trace, each on a track of its own name.

    A run without a trace has one without a path. What can't be written is not written: no run ends
    for its trace.

    Args:
        limit: bytes of the file after which nothing more is written.
    """

    def __init__(self, path: Path | None, *, limit: float = float("inf")) -> None:
        self._file: IO[str] | None = None
        self._tracks: dict[str, int] = {}
        if path is not None:
            with suppress(OSError):
                self._file = _open(path)
                limit -= path.stat().st_size
        self._left = limit

    def add(self, track: str, span: Span, **facts: Any) -> None:
        """Write a span; `facts` are shown with it."""
        if self._file is None:
            return
        event = {
            "name": span.name,
            "ph": "X",
            "ts": round(span.start * 1e6),
            "dur": max(round((span.end - span.start) * 1e6), 0),
            "pid": _PROCESS,
            "tid": self._number(track),
        }
        self._write({**event, "args": facts} if facts else event)

    def add_all(self, track: str, spans: Sequence[Span]) -> None:
        for span in spans:
            self.add(track, span)

    def flush(self) -> None:
        """Make what was added so far readable for others."""
        if self._file is not None:
            with suppress(OSError):
                self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _number(self, track: str) -> int:
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks) + 1
            names = {"name": track}
            order = {"sort_index": self._tracks[track]}
            for kind, facts in (("thread_name", names), ("thread_sort_index", order)):
                place = {"ph": "M", "pid": _PROCESS, "tid": self._tracks[track]}
                self._write({"name": kind, **place, "args": facts})
        return self._tracks[track]

    def _write(self, event: dict[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._left -= self._file.write(json.dumps(event) + ",\n")
            if self._left < 0:
                self.close()
        except OSError:
            self.close()


class BusyClock:
    """Turns a count of things under way into spans in which there was at least one.

    Args:
        track: where the spans go.
    """

    def __init__(self, trace: Trace, track: str) -> None:
        self._trace, self._track = trace, track
        self._count = self._most = 0
        self._since = 0.0

    def add(self, count: int) -> None:
        """So many more (or fewer) are under way."""
        if not self._count:
            self._since, self._most = time.time(), 0
        self._count += count
        self._most = max(self._most, self._count)
        if not self._count:
            self._trace.add(self._track, Span("busy", self._since, time.time()), most=self._most)


def _open(path: Path) -> IO[str]:
    """Go on with what is there, but for a line that a kill cut off."""
    kept = 0
    if path.is_file():
        kept = path.read_bytes().rfind(b"\n") + 1
        os.truncate(path, kept)
    file = path.open("a", encoding="utf-8")
    if not kept:
        file.write("[\n")
        file.flush()
    return file
