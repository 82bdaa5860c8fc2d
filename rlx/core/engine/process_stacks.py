"""The stacks of a process on this machine, whatever it hangs in.

A worker's process writes its stacks when it gets SIGUSR2 (`faulthandler`, which needs neither the
interpreter's lock nor the event loop) to its standard error, which is a file, from which they are
copied. One that is stopped goes on for that moment. Where `py-spy` is installed it is asked as
well: it needs no help of the process.
"""

from __future__ import annotations

import asyncio
import faulthandler
import shutil
import signal
from pathlib import Path

import psutil

_PATIENCE = 2.0
"""Seconds that a process has to write its stacks."""
_LOOK_EVERY = 0.05
_SPY_PATIENCE = 20.0
"""Seconds that py-spy has."""
_STANDARD_ERROR = 2


def write_stacks_on_signal() -> None:
    """From now on SIGUSR2 makes this process write the stacks of all threads to standard error."""
    faulthandler.register(signal.SIGUSR2, file=_STANDARD_ERROR, all_threads=True)


async def stacks_of(pid: int) -> str:
    """State and stacks of a process that called `write_stacks_on_signal`."""
    try:
        process = psutil.Process(pid)
        state = process.status()
        added = await _signalled(process, stopped=state == psutil.STATUS_STOPPED)
    except psutil.Error:
        return "The process is gone.\n"
    except OSError as error:
        added = f"Its log can't be read: {error}\n"
    return f"state of the process: {state}\n\n{added}" + await _spied(pid)


async def _signalled(process: psutil.Process, *, stopped: bool) -> str:
    """What the process adds to its log when it is asked for its stacks."""
    log = _log(process)
    if log is None:
        return "It can't write its stacks: its standard error is no file.\n"
    before = size = log.stat().st_size
    process.send_signal(signal.SIGUSR2)
    if stopped:
        process.resume()
    for _ in range(int(_PATIENCE / _LOOK_EVERY)):
        await asyncio.sleep(_LOOK_EVERY)
        if size > before and log.stat().st_size == size:
            break
        size = log.stat().st_size
    if stopped:
        process.suspend()
    with log.open("rb") as file:
        file.seek(before)
        added = file.read().decode(errors="replace")
    return added or "It does not answer the signal that asks for its stacks.\n"


def _log(process: psutil.Process) -> Path | None:
    """The file that it writes its standard error to: the run's log of it, or Ray's where the run's
    folder is on another machine."""
    files = (file.path for file in process.open_files() if file.fd == _STANDARD_ERROR)
    return next(map(Path, files), None)


async def _spied(pid: int) -> str:
    """The stacks as py-spy sees them; empty where it isn't installed."""
    command = shutil.which("py-spy")
    if command is None:
        return ""
    process = await asyncio.create_subprocess_exec(
        command,
        *("dump", "--pid", str(pid)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), _SPY_PATIENCE)
    except TimeoutError:
        process.kill()
        return ""
    return "\npy-spy dump:\n" + output.decode(errors="replace")
