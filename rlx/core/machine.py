"""What this machine has: processors, memory, shared memory, accelerators; without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One accelerator as the driver's tool reports it."""

    name: str
    memory: int
    """Bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Resources of this host, container limits taken into account. Sizes in bytes."""

    cpus: int
    memory: int
    memory_available: int
    shared_memory: int | None
    """Free bytes of /dev/shm; None where there is none."""
    gpus: tuple[Gpu, ...]


def this_machine() -> Machine:
    """Look at this host."""
    memory = psutil.virtual_memory()
    limit, used = _memory_limit()
    total = min(memory.total, limit or memory.total)
    available = min(memory.available, total - used) if limit else memory.available
    shm = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None
    return Machine(
        cpus=cpu_count(),
        memory=total,
        memory_available=max(available, 0),
        shared_memory=shm,
        gpus=find_gpus(),
    )


def cpu_count() -> int:
    """Processors that this process may use: affinity, capped by the container's quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return count


def find_gpus() -> tuple[Gpu, ...]:
    """NVIDIA devices that `nvidia-smi` lists and CUDA_VISIBLE_DEVICES leaves; () without any."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in done.stdout.splitlines():
        name, _, size = line.rpartition(",")
        mib = int(size) if size.strip().isdigit() else 0
        found.append(Gpu(name=name.strip(), memory=mib * 2**20))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(found)
    chosen = [word.strip() for word in visible.split(",") if word.strip()]
    if all(word.isdigit() for word in chosen):
        return tuple(found[int(word)] for word in chosen if int(word) < len(found))
    return tuple(found[: len(chosen)])


def _memory_limit() -> tuple[int | None, int]:
    """The container's memory limit and use, (None, 0) without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        return (int(limit), used) if limit != "max" else (None, 0)
    except (OSError, ValueError):
        return None, 0
