"""A Python session in the sandbox: what a program defines stays for the next piece of code.

Runs in an interpreter of its own, with the request as the first line of standard input; after that
standard input and output are the program's (`repl.py`), which is watched and kept in as any other.
Nothing that comes out of it is trusted: it is text for a model. Standard library and neighbours
only.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys

import landlock  # the neighbouring files: their folder is on this interpreter's path
import user
import watch
from start import bounds, spawn
from supervisor import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, Request, isolate

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):  # byte by byte: what follows is not for this process
        line += os.read(0, 1) or b"\n"
    request: Request = json.loads(line)
    request["user"] = user.own_user()
    isolated, dropped = isolate(request)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # a change of user takes it back
    watch.adopt_orphans()
    done, done_end = os.pipe()
    child = os.fork()  # process 1 of the new PID namespace: when it ends, so does all else
    if not child:
        os.close(done)
        confined = dropped or landlock.version() > 0
        hold(request, {"isolated": isolated, "confined": confined})
    signal.signal(signal.SIGTERM, end)
    os.close(done_end)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    breach = watch.watch(child, done, request["folder"], bounds(request))
    watch.end_descendants()
    if breach:
        os.write(2, breach.detail.encode())
    os._exit(0)


def end(*_: object) -> None:
    """The session is over: nothing of it is left."""
    watch.end_descendants()
    os._exit(0)


def hold(request: Request, facts: dict[str, bool]) -> None:
    """Start the program on standard input and output and wait for its end."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    watch.adopt_orphans()
    os.write(1, json.dumps(facts).encode() + b"\n")
    program = spawn(
        request,
        ["-c", request["runner"], str(request["output"])],
        stdin=sys.stdin.fileno(),
        stdout=sys.stdout.fileno(),
        stderr=subprocess.DEVNULL,
    )
    program.wait()
    os._exit(0)
