"""Watch a program from outside: how many processes, how much memory and disk *all* of it takes.

The kernel's limits hold for each process by itself (and that on their number not for root), so
this is what ends fork bombs and programs that share out their gigabytes. It needs a kernel with
CONFIG_PROC_CHILDREN, as distributions have it. Imported by the supervisor, so it imports the
standard library only.
"""

import contextlib
import ctypes
import os
import resource
import select
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
_INTERVAL = 0.02
_PAGE = resource.getpagesize()
_ENTRIES = 4096
"""Files and folders that a program may have in its folder."""
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Bounds:
    """What the processes of one program may take together."""

    processes: int
    """Processes and threads."""
    memory: int
    """Bytes that are resident."""
    files: int
    """Bytes in the folder."""


@dataclass(frozen=True)
class Breach:
    """The limit that a program went over."""

    limit: str
    """`processes`, `memory` or `files`."""
    detail: str


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent ends (Linux 3.4)."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def watch(root: int, done: int, folder: str, bounds: Bounds) -> Breach | None:
    """Wait until `done` is readable, or until the descendants of `root` go over a bound.

    `root` is then killed, and with it, where it is the first of its PID namespace, the rest.

    Args:
        root: the process whose descendants are the program; it is not counted itself.
        done: a descriptor that the process `root` writes to, or closes by ending.
        folder: the program's own.
    """
    poller = select.poll()
    poller.register(done, select.POLLIN)
    wait = _INTERVAL
    while not poller.poll(wait * 1000):
        start = time.monotonic()
        if breach := _breach(root, folder, bounds):
            os.kill(root, signal.SIGKILL)
            return breach
        wait = max(_INTERVAL, 4 * (time.monotonic() - start))
    return None


def end_descendants() -> None:
    """Kill all that descends from this process; returns when nothing of it is left alive."""
    alive = True
    while alive:
        alive = False
        for pid in descendants(os.getpid()):
            if _state(pid) not in "ZX":
                alive = True
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants(root: int) -> Iterator[int]:
    """The processes below `root`, zombies included, parents before children."""
    parents = [root]
    while parents:
        parent = parents.pop()
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                children = [int(pid) for pid in (task / "children").read_text().split()]
                parents += children
                yield from children


def _breach(root: int, folder: str, bounds: Bounds) -> Breach | None:
    tasks = resident = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError, ValueError):
            tasks += sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
            resident += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE
        if tasks > bounds.processes:
            return Breach("processes", f"more than {bounds.processes} processes and threads")
    if resident > bounds.memory:
        return Breach("memory", f"more than {bounds.memory >> 20} MiB of memory")
    if (size := _size(folder)) > bounds.files:
        what = f"more than {bounds.files >> 20} MiB of files"
        return Breach("files", what if size < 1 << 62 else f"more than {_ENTRIES} files")
    return None


def _size(folder: str) -> int:
    """Bytes of the files below a folder; 2^62 for too many of them."""
    size = entries = 0
    folders = [folder]
    while folders:
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as found:
            for entry in found:
                entries += 1
                if entries > _ENTRIES:
                    return 1 << 62
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
    return size


def _state(pid: int) -> str:
    """One letter, Z for a zombie; X for one that is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode()
    return "X"
