"""Ends what a killed driver leaves behind: `python -m rlx.core.engine.reaper`.

A driver that ends in order ends its workers itself. After SIGKILL it can't, and some of Ray's
helpers live on. This process remembers the driver's descendants and ends those that outlive it.
Its standard input is a pipe that the driver holds open: end of file means that the driver is gone.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys

import psutil

_EVERY = 1.0
"""Seconds between two looks at the driver's descendants."""
_PATIENCE = 3.0
"""Seconds that they get to end by themselves once the driver is gone."""


def start_reaper() -> subprocess.Popen[bytes]:
    """Start the watcher of this process; `stop_reaper` ends it."""
    return subprocess.Popen(
        [sys.executable, "-m", "rlx.core.engine.reaper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C for the driver's group is not for the watcher
    )


def stop_reaper(reaper: subprocess.Popen[bytes]) -> None:
    reaper.kill()
    reaper.wait()


def watch(driver: int) -> None:
    """Return when the driver is gone and nothing of it is left."""
    known: dict[int, psutil.Process] = {}
    while not _end_of_input(_EVERY):
        try:
            found = psutil.Process(driver).children(recursive=True)
        except psutil.Error:
            break
        known = {process.pid: process for process in found if process.pid != os.getpid()}
    _, alive = psutil.wait_procs(list(known.values()), timeout=_PATIENCE)
    for process in alive:
        try:
            process.kill()  # psutil compares start times, so a reused number is safe
        except psutil.Error:
            continue


def _end_of_input(timeout: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], timeout)
    return bool(readable)


if __name__ == "__main__":
    watch(os.getppid())
