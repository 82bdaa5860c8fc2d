"""Ends what a killed driver leaves behind: `python -m rlx.core.engine.reaper`.

A driver that ends in order ends its workers itself. After SIGKILL it can't, and some of Ray's
helpers live on. This process remembers the driver's descendants, and ends those that outlive it.
What was started since it last looked, and has no living parent any more, it knows by a variable of
the environment, which descendants inherit.

Its standard input is a pipe that the driver holds open: end of file means that the driver is gone.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterable

import psutil

MARK = "RLX_DRIVER_ID"
"""Variable that the descendants of a driver have, with a value of its own for each run."""
_EVERY = 1.0
"""Seconds between two looks at the driver's descendants."""
_PATIENCE = 3.0
"""Seconds that they get to end by themselves once the driver is gone."""
_ROUNDS = 5
"""So often it looks again after it killed some: what it kills may just have started another one."""


def start_reaper() -> subprocess.Popen[bytes]:
    """Start the watcher of this process, before what it is to watch; `stop_reaper` ends it."""
    os.environ[MARK] = uuid.uuid4().hex
    return subprocess.Popen(
        [sys.executable, "-m", "rlx.core.engine.reaper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C for the driver's group is not for the watcher
    )


def stop_reaper(reaper: subprocess.Popen[bytes]) -> None:
    os.environ.pop(MARK, None)
    reaper.kill()
    reaper.wait()


def watch(driver: int, mark: str) -> None:
    """Return when the driver is gone and nothing of it is left.

    Args:
        mark: value of `MARK` in the environment of the driver's descendants.
    """
    known: set[psutil.Process] = set()
    while not _end_of_input(_EVERY):
        known = {process for process in known if process.is_running()}
        try:
            # Beside those that are known already: one that is dying has no children any more.
            known.update(psutil.Process(driver).children(recursive=True))
        except psutil.Error:
            break
    known.update(_marked(mark))
    psutil.wait_procs(_others(known, driver), timeout=_PATIENCE)
    for _ in range(_ROUNDS):
        known.update(_marked(mark))
        left = [process for process in _others(known, driver) if _kill(process)]
        if not left:
            return
        psutil.wait_procs(left, timeout=_PATIENCE)


def _others(processes: Iterable[psutil.Process], driver: int) -> list[psutil.Process]:
    """Without this process and the driver, which whoever started it may not have waited for."""
    return [process for process in processes if process.pid not in (os.getpid(), driver)]


def _marked(mark: str) -> list[psutil.Process]:
    """Processes of this user whose environment has the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):  # another user's, or it has just ended
            continue
    return found


def _kill(process: psutil.Process) -> bool:
    """Kill it; false when it had ended before."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        process.kill()  # psutil compares start times, so a reused number is safe
    except psutil.Error:
        return False
    return True


def _end_of_input(timeout: float) -> bool:
    readable, _, _ = select.select([sys.stdin], [], [], timeout)
    return bool(readable)


if __name__ == "__main__":
    watch(os.getppid(), os.environ[MARK])
