"""Start the program's process with all that keeps it in: limits, another user, Landlock.

Imported by the supervisor, so it imports the standard library and its neighbours only.
"""

import contextlib
import ctypes
import math
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import landlock
import user
import watch

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
FILES = 4
"""Files of the largest size that a program may write."""
libc = ctypes.CDLL(None, use_errno=True)
Request = dict[str, Any]


def limits(request: Request, who: int) -> dict[int, int]:
    """Resource limits of a program that runs as the user `who`."""
    return {
        resource.RLIMIT_CPU: math.ceil(request["timeout"]) + 1,
        resource.RLIMIT_AS: request["memory_mib"] << 20,
        resource.RLIMIT_FSIZE: request["file_mib"] << 20,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        # Counted per user, so what the user runs already is on top. Root itself is never bound.
        resource.RLIMIT_NPROC: tasks_of(who) + 1 + request["processes"],
    }


def bounds(request: Request) -> watch.Bounds:
    """What all processes of the program may take together."""
    return watch.Bounds(
        processes=request["processes"] + 1,
        memory=request["memory_mib"] << 20,
        files=(request["file_mib"] << 20) * FILES,
    )


def tasks_of(who: int) -> int:
    """Processes and threads that the user runs."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid == who:
                count += sum(1 for _ in (process / "task").iterdir())
    return count


def spawn(request: Request, command: list[str], **streams: Any) -> subprocess.Popen[bytes]:
    root = os.geteuid() == 0
    who = request["user"] if root else os.getuid()
    kernel = limits(request, who)

    def confine() -> None:
        if root:
            user.become(who, request["folder"])
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        for what, most in kernel.items():
            _, hard = resource.getrlimit(what)
            bound = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(what, (bound, bound))
        writable = [request["folder"], os.devnull]
        if not landlock.confine(request["readable"], writable) and landlock.version():
            raise OSError("Landlock refused")

    environment = {"PATH": "/usr/bin:/bin", "HOME": request["folder"], "LANG": "C.UTF-8"}
    # Numerical libraries start a thread for each core, which may be more than are allowed.
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *request["flags"], *command],
        cwd=request["folder"],
        env={**environment, "TMPDIR": request["folder"], "PYTHONDONTWRITEBYTECODE": "1"},
        preexec_fn=confine,
        **streams,
    )
