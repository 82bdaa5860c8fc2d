"""Give up root: a user of its own, for whom limits on processes hold, and no capabilities.

Imported by the supervisor, so it imports the standard library only.
"""

import contextlib
import ctypes
import os

PR_SET_KEEPCAPS, PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 24, 47, 2
CAP_DAC_READ_SEARCH, CAP_LAST = 2, 63
NOBODY = 65534
_FIRST = 1_900_000_000
_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def own_user() -> int:
    """A user id that no other program has, by this process's number."""
    return _FIRST + os.getpid()


def drop(user: int, folder: str) -> None:
    """Be `user`, or else `nobody`, from now on, and give it the folder."""
    os.setgroups([])
    for candidate in (user, NOBODY):
        with contextlib.suppress(OSError):  # a container may know no such user
            os.chown(folder, candidate, candidate)
            os.setresgid(candidate, candidate, candidate)
            os.setresuid(candidate, candidate, candidate)
            return


def become(user: int, folder: str) -> None:
    """Run this process, and what it starts, as `user` or else `nobody`, with root's files to read.

    Python may well lie where only root can read it. What can be read is Landlock's to say. Where
    neither user is to be had, the process stays root without root's powers: it could lift its own
    limits with them.
    """
    _libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
    for capability in range(CAP_LAST + 1):
        if capability != CAP_DAC_READ_SEARCH:
            _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    drop(user, folder)
    kept = 1 << CAP_DAC_READ_SEARCH
    # effective, permitted, inheritable: the lower words, then the upper ones
    sets = (ctypes.c_uint32 * 6)(kept, kept, kept, 0, 0, 0)
    _libc.capset((ctypes.c_uint32 * 2)(_VERSION_3, 0), sets)
    _libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)
