"""Runs a command and measures it: wall time, and the peak memory of all of its processes."""

from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

_SECONDS_BETWEEN = 1.0
_GROWTH = 1.01
"""The exact look costs some milliseconds for each GiB, so it is taken when the memory has grown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a command took."""

    seconds: float
    peak_gib: float
    """Most memory of the command and all of its descendants at one time; a page that several share
    counts once (proportional set size)."""
    output: str
    """Standard output."""


def measure(command: Sequence[str], *, env: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end.

    Raises:
        RuntimeError: it failed; the message ends with what it printed last.
    """
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=errors, env={**os.environ, **(env or {})}
        )
        watch = _Watch(process.pid)
        code = process.wait()
        seconds = time.perf_counter() - started
        watch.stop()
        output.seek(0)
        errors.seek(0)
        text = output.read()
        if code:
            last = (text + errors.read())[-4000:]
            raise RuntimeError(f"{' '.join(command)} ended with {code}:\n{last}")
    return Measured(seconds=seconds, peak_gib=watch.peak_gib, output=text)


class _Watch:
    """Looks at a process tree from time to time, in a thread."""

    def __init__(self, root: int) -> None:
        self.peak_gib = 0.0
        self._root = psutil.Process(root)
        self._known = {self._root}
        self._resident = 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        """Consumes nothing; waits for the clock; ended by `stop`; produces `peak_gib`."""
        while not self._done.wait(_SECONDS_BETWEEN):
            with suppress(psutil.Error):
                # Who was a descendant once still is, even if its parent has ended.
                self._known.update(self._root.children(recursive=True))
            resident = sum(map(_resident, self._known))
            if resident > _GROWTH * self._resident:
                self._resident = resident
                self.peak_gib = max(self.peak_gib, sum(map(_proportional, self._known)) / 2**30)


def _resident(process: psutil.Process) -> int:
    """Bytes in memory; those that processes share count in each."""
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _proportional(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def warn_if_busy() -> None:
    """Say so when the machine has other work."""
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the load average is {load:.1f}; timings need an otherwise idle machine\n")
