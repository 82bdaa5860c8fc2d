"""Where a process is: which shared memory it sees, and how others reach it."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LOOPBACK = "127.0.0.1"
FILE_PREFIX = "rlx-buckets-"
"""Of files in shared memory; process and link follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A process's shared memory and address."""

    memory: str
    """Processes with the same text see the same files under `shared_memory_root()`. A container
    with a `/dev/shm` of its own has another one than its neighbours on the machine."""
    address: str
    """IP address for the other processes of the run."""


def here() -> Place:
    """Where this process is."""
    boot = _BOOT.read_text().strip() if _BOOT.is_file() else "unknown"
    return Place(memory=f"{boot}/{shared_memory_root().stat().st_dev}", address=_address())


def shared_memory_root() -> Path:
    """A folder in memory where the machine has one."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def remove_left(key: str) -> None:
    """Remove what the sender of a link left in this host's shared memory when it was killed."""
    for path in shared_memory_root().glob(f"{FILE_PREFIX}*-{key}"):
        path.unlink(missing_ok=True)


def _address() -> str:
    """A Ray worker's is its node's; without Ray all workers are in one process."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return _LOOPBACK
    return str(ray.util.get_node_ip_address())
