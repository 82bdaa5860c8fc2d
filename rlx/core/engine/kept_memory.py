"""Memory that stays with a process that trains, in the place of new pages for every large tensor.

By default glibc gives what a large tensor leaves behind back to the kernel, and asks for it again
for the next one; the kernel clears the new pages one by one as they are touched. What is as large
as the model stays apart (128 MiB and more): it is made once, or would leave holes.
"""

from __future__ import annotations

import contextlib
import ctypes

KEPT_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": str(2**27),
    "MALLOC_TRIM_THRESHOLD_": str(2**42),
    "MALLOC_TOP_PAD_": str(2**26),
    "MALLOC_ARENA_MAX": "1",
}
"""Environment of a process that will train."""
_PARAMETERS = {
    "MALLOC_TRIM_THRESHOLD_": -1,
    "MALLOC_TOP_PAD_": -2,
    "MALLOC_MMAP_THRESHOLD_": -3,
    "MALLOC_ARENA_MAX": -8,
}
"""Of `mallopt`, from glibc's malloc.h."""


def keep_memory() -> None:
    """Have a process that runs already keep its memory too; where there is no glibc, do nothing.

    A thread that has its own arena by then keeps that one, which can't hold more than 64 MiB.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        mallopt = ctypes.CDLL(None).mallopt
        for name, value in KEPT_MEMORY.items():
            mallopt(_PARAMETERS[name], min(int(value), 2**31 - 1))
