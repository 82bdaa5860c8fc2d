"""Ends the processes that this process started, when there is no time to ask them."""

from __future__ import annotations

import psutil


def end_descendants(patience: float = 1.0) -> None:
    """SIGTERM, then SIGKILL, to every descendant of this process."""
    descendants = psutil.Process().children(recursive=True)
    for process in descendants:
        _quietly(process.terminate)
    _, alive = psutil.wait_procs(descendants, timeout=patience)
    for process in alive:
        _quietly(process.kill)


def _quietly(action: object) -> None:
    try:
        action()  # type: ignore[operator]
    except psutil.Error:
        return
