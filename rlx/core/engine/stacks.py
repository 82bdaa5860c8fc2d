"""Where every thread of every worker is, in files: what one wants to see when a run hangs.

A worker's process writes its stacks when it gets SIGUSR2 (`faulthandler`, which needs neither the
interpreter's lock nor the event loop) to its log, from which they are copied. Where `py-spy` is
installed it is asked as well: it can read a process that is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_PATIENCE = 2.0
"""Seconds that a process has to write its stacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a worker's process is."""

    host: str
    pid: int

    @property
    def here(self) -> bool:
        return self.host == socket.gethostname()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A worker whose stacks are wanted."""

    name: str
    location: Location
    doing: Sequence[str]
    """Methods that the driver waits for."""
    log: Path | None
    """File that its process writes its standard error to."""


def own_location() -> Location:
    return Location(host=socket.gethostname(), pid=os.getpid())


def write_stacks_on_signal() -> None:
    """From now on SIGUSR2 makes this process write the stacks of all threads to standard error."""
    faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


async def dump_stacks(folder: Path, suspects: Sequence[Suspect]) -> None:
    """Write `folder/<worker>.txt` for each suspect and `folder/driver.txt`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "driver.txt").write_text(_own_stacks())
    texts = await asyncio.gather(*(_stacks_of(suspect) for suspect in suspects))
    for suspect, text in zip(suspects, texts, strict=True):
        doing = ", ".join(suspect.doing) or "nothing"
        head = f"worker {suspect.name}, process {suspect.location.pid} on {suspect.location.host}\n"
        head += f"the driver waits for: {doing}\n\n"
        (folder / f"{suspect.name}.txt").write_text(head + text)


async def _stacks_of(suspect: Suspect) -> str:
    location = suspect.location
    if not location.here:
        return f"It is on another machine; there: py-spy dump --pid {location.pid}\n"
    try:
        state = psutil.Process(location.pid).status()
    except psutil.Error:
        return "The process is gone.\n"
    text = f"state of the process: {state}\n\n"
    if suspect.log is not None and suspect.log.is_file():
        text += await _signalled(location.pid, suspect.log)
    return text + await _spied(location.pid)


async def _signalled(pid: int, log: Path) -> str:
    """What the process adds to its log when it is asked for its stacks."""
    before = size = log.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)
    for _ in range(int(_PATIENCE / 0.1)):
        await asyncio.sleep(0.1)
        if size > before and log.stat().st_size == size:
            break
        size = log.stat().st_size
    with log.open("rb") as file:
        file.seek(before)
        added = file.read().decode(errors="replace")
    return added or "It does not answer the signal that asks for its stacks.\n"


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
        output, _ = await asyncio.wait_for(process.communicate(), 10 * _PATIENCE)
    except TimeoutError:
        process.kill()
        return ""
    return "\npy-spy dump:\n" + output.decode(errors="replace")


def _own_stacks() -> str:
    """Threads and tasks of this process."""
    out = io.StringIO()
    for thread, frame in sys._current_frames().items():
        out.write(f"thread {thread}\n" + "".join(traceback.format_stack(frame)) + "\n")
    for task in asyncio.all_tasks():
        out.write(f"task {task.get_name()}\n")
        task.print_stack(file=out)
        out.write("\n")
    return out.getvalue()
