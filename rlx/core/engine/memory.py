"""Peak memory of a process: of its accelerator, and of itself on the host."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_GIB = 2**30
_HIGH_WATER = re.compile(rb"^VmHWM:\s+(\d+) kB", re.MULTILINE)
_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Peaks in GiB since the last look."""

    host: float
    device: float | None
    """None: the process uses no accelerator."""


def take_memory() -> MemoryUse:
    """This process's peaks since the last call; where the host can't tell, since its start."""
    return MemoryUse(host=_take_host(), device=_take_device())


def memory_metrics(found: Iterable[tuple[str, MemoryUse]]) -> dict[str, float]:
    """`memory/<role>_gib` of the largest process of each role: accelerator, else host."""
    metrics: dict[str, float] = {}
    for role, use in found:
        numbers = {"gib": use.host}
        if use.device is not None:
            numbers = {"gib": use.device, "host_gib": use.host}
        for what, value in numbers.items():
            name = f"memory/{role}_{what}"
            metrics[name] = max(value, metrics.get(name, 0.0))
    return metrics


def _take_host() -> float:
    """Peak resident set. Linux forgets the peak on request, which `getrusage` knows nothing of."""
    process = Path("/proc/self")
    try:
        found = _HIGH_WATER.search((process / "status").read_bytes())
        (process / "clear_refs").write_text(_RESET_PEAK)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024 / _GIB
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / _GIB


def _take_device() -> float | None:
    torch = sys.modules.get("torch")  # a process that did not import it has no tensors
    if torch is None or not torch.cuda.is_initialized():
        return None
    peak = torch.cuda.max_memory_allocated() / _GIB
    torch.cuda.reset_peak_memory_stats()
    return float(peak)
