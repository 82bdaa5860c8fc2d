"""Run a program's tests in a sandbox: limits, no network, no files, and nothing outlives it.

The program is a process that the supervisor (`supervisor.py`) starts and asks for results. What
keeps it in, each where the system permits it:

    limits        CPU time, address space, size of files, descriptors, processes     always
    watching      the same of all its processes together, from outside (`watch.py`)  always
    namespaces    no network; the kernel ends all its processes with the supervisor  `isolated`
    Landlock      only its own folder, Python and the system's libraries exist       `confined`
    user          root's programs run as another user, without capabilities          always
    environment   none of rlx's variables                                            always

It is a fence for what a policy comes up with, not for an adversary with time.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

_HERE = Path(__file__).parent
_SUPERVISOR = (
    f"import sys; sys.path.insert(0, {str(_HERE)!r}); import supervisor; supervisor.main()"
)
_NOBODY = 65534
_STARTUP = 30.0
"""Seconds beyond the program's own after which the supervisor is ended; a busy machine is slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one program may use."""

    timeout: float = 10.0
    """Seconds for all tests of one program."""
    memory_mib: int = 512
    """Address space of a process, memory of all of them together."""
    file_mib: int = 16
    """Size of a file that it writes; all its files together may have four times that."""
    processes: int = 16
    """Threads and processes beside the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests said."""

    passed: int
    total: int
    detail: str
    """Why tests failed, for people."""
    stopped: str = ""
    """The limit that the program was ended at: `time`, `memory`, `processes` or `files`."""
    isolated: bool = True
    """The program had no network, and no process of it is left."""
    confined: bool = True
    """It could not read or write the user's files."""

    @property
    def timed_out(self) -> bool:
        return self.stopped == "time"


def run_tests(
    program: str,
    tests: Sequence[str] | Sequence[Mapping[str, str]],
    *,
    kind: Literal["code", "io"],
    limits: Limits,
    entry_point: str = "",
    prelude: str = "",
    check: bool = False,
    site_packages: bool = False,
) -> Verdict:
    """Return how many tests a Python program passes.

    Args:
        tests: code that raises when the program is wrong, or `{"input": …, "output": …}`.
        entry_point: the function under test, never taken from `prelude`.
        prelude: code that the tests may use (the task's own helpers).
        check: each test defines `check(candidate)`.
        site_packages: let the program import installed packages.

    Raises `ValueError` for tests that can't be run across processes, `RuntimeError` when the
    sandbox itself fails.
    """
    nonce = secrets.token_hex(16)
    folder = tempfile.mkdtemp(prefix="rlx-code-")
    request = {
        "nonce": nonce,
        "folder": folder,
        "program": program,
        "tests": list(tests),
        "kind": kind,
        "entry_point": entry_point,
        "prelude": prelude,
        "check": check,
        "drop_user": drops_user(),
        "flags": ["-I"] if site_packages else ["-I", "-S"],
        "readable": readable(site_packages=site_packages),
        "runner": (_HERE / "program.py").read_text(),
        "timeout": limits.timeout,
        "memory_mib": limits.memory_mib,
        "file_mib": limits.file_mib,
        "processes": limits.processes,
    }
    try:
        answer = _supervise(request, limits.timeout + _STARTUP)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if answer is None:
        return Verdict(passed=0, total=len(tests), detail="time-out", stopped="time")
    if answer.get("nonce") != nonce:  # tests are the data set's, but the verdict isn't theirs
        raise RuntimeError("the sandbox gave no verdict of its own")
    if "crashed" in answer:
        raise RuntimeError(f"the sandbox failed:\n{answer['crashed']}")
    if "unsupported" in answer:
        raise ValueError(f"these tests can't run in the sandbox: {answer['unsupported']}")
    timed_out = bool(answer.get("timed_out"))
    return Verdict(
        passed=int(answer.get("passed", 0)),
        total=len(tests),
        detail="time-out" if timed_out else str(answer["detail"]),
        stopped="time" if timed_out else str(answer.get("stopped", "")),
        isolated=bool(answer["isolated"]),
        confined=bool(answer.get("confined")),
    )


@cache
def drops_user() -> bool:
    """Whether the tests can run as another user: rlx is root, and others can start this Python."""
    if os.geteuid() != 0:
        return False
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", "import pickle, ctypes"],
            user=_NOBODY,
            group=_NOBODY,
            extra_groups=[],
            capture_output=True,
            timeout=60,
            check=False,
            cwd="/",
        )
        return done.returncode == 0
    return False


def readable(*, site_packages: bool) -> list[str]:
    """Return what a program may read: Python, the system's libraries, and little else."""
    python = {sys.base_prefix, sys.base_exec_prefix}
    python |= {sys.prefix, *sys.path} if site_packages else {f"{sys.prefix}/pyvenv.cfg"}
    # Resolved: the interpreter may be a link in a folder that isn't named here.
    python |= {str(Path(sys.executable).resolve()), sys.executable}
    system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime"]
    return [*sorted(filter(None, python)), *system, "/dev/null", "/dev/zero", "/dev/urandom"]


def _supervise(request: Mapping[str, Any], timeout: float) -> dict[str, Any] | None:
    """Return the supervisor's answer, or None when time was up."""
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _SUPERVISOR],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        start_new_session=True,
    ) as supervisor:
        try:
            out, errors = supervisor.communicate(json.dumps(request).encode(), timeout=timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(supervisor.pid, signal.SIGKILL)
    try:
        return dict(json.loads(out))
    except ValueError:
        raise RuntimeError(
            f"the sandbox failed (exit code {supervisor.returncode}): {errors.decode()[-2000:]}"
        ) from None
