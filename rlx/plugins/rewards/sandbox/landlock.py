"""Landlock: a process gives up all files but those that it names (Linux 5.13 and later).

https://docs.kernel.org/userspace-api/landlock.html. Needs no privilege; children inherit it, and a
confined process can trace only those that are as confined. Imported by the supervisor, so it
imports the standard library only.
"""

import ctypes
import os
import stat
from collections.abc import Iterable

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""System call numbers, the same on all architectures."""
_EXECUTE, _WRITE, _READ, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_KNOWN = (0, 13, 14, 15, 15, 16)
"""File rights by version of the interface: bits 0 up to this."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("net", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def version() -> int:
    """Version of the kernel's interface; 0 where there is none."""
    return max(0, int(_libc.syscall(_CREATE, None, 0, 1)))


def confine(readable: Iterable[str], writable: Iterable[str]) -> bool:
    """Give up everything but these paths, TCP and signals to others; says whether it could.

    The caller has set `PR_SET_NO_NEW_PRIVS`. Paths that don't exist are passed over.
    """
    if not (abi := version()):
        return False
    files = (1 << _KNOWN[min(abi, len(_KNOWN) - 1)]) - 1
    attributes = _Ruleset(files, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    ruleset = int(_libc.syscall(_CREATE, ctypes.byref(attributes), size, 0))
    if ruleset < 0:
        return False
    for paths, rights in ((readable, _EXECUTE | _READ | _READ_DIR), (writable, files)):
        for path in paths:
            _allow(ruleset, path, rights & files)
    done = _libc.syscall(_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return done


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    if not stat.S_ISDIR(os.fstat(fd).st_mode):
        rights &= _OF_FILES
    rule = _PathBeneath(rights, fd)
    _libc.syscall(_ADD, ruleset, 1, ctypes.byref(rule), 0)
    os.close(fd)
