"""Checkpoints of a run: written aside, verified, renamed; only then are old ones evicted.

checkpoints/step-000100/
  state.pt       driver: step, sampler, counters, component state
  policy/        learner: weights, optimizer, schedule, RNG (DeepSpeed)
  model/         Hugging Face folder of the policy; of a policy with adapters, adapter/ alone
  files.json     size and CRC-32 of every file above, written last
checkpoints/latest -> step-000100
checkpoints/best -> step-000080     never evicted
"""

from __future__ import annotations

import json
import re
import shutil
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlx.core.errors import EngineError, UsageError
from rlx.core.run import write_json

_NAME = re.compile(r"step-(\d+)$")
_INDEX = "files.json"
_BLOCK = 1 << 22


async def save_checkpoint(
    root: Path,
    step: int,
    state: Mapping[str, Any],
    write_model: Callable[[str], Awaitable[None]],
    *,
    keep: int,
    best: int | None = None,
) -> Path:
    """Write `root/step-NNNNNN` and return it.

    Args:
        state: primitives, containers of them, and tensors (read back with `weights_only`).
        write_model: writes `policy/` and `model/` (`adapter/`) into the folder it is given.
        keep: how many of the newest checkpoints stay, the new one included.
        best: step whose checkpoint stays besides; `root/best` points to it.

    Raises:
        EngineError: when the checkpoint can't be written whole; older ones are then untouched.
    """
    import torch

    final = root / _folder_name(step)
    aside = root / f"{final.name}.partial"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        await write_model(str(aside))
        torch.save(dict(state), aside / "state.pt")
        torch.load(aside / "state.pt", weights_only=True)
        write_index(aside)
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise EngineError(
            f"can't write the checkpoint {final}: {error.strerror or error}"
        ) from error
    _point(root, "latest", final)
    if best is not None and (root / _folder_name(best)).is_dir():
        _point(root, "best", root / _folder_name(best))
    _evict(root, keep)
    return final


def latest_checkpoint(root: Path, *, at_most: int | None = None) -> Path | None:
    """The newest whole checkpoint under `root`, of step `at_most` or before; damaged ones are
    passed over."""
    for folder in sorted(checkpoints(root), reverse=True):
        if (at_most is None or step_of(folder) <= at_most) and not damage(folder):
            return folder
    return None


def resumable_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint; None when none was ever written.

    Raises:
        UsageError: there are checkpoints, and every one of them is damaged.
    """
    whole = latest_checkpoint(root)
    found = sorted(checkpoints(root), reverse=True)
    if whole is None and found:
        raise UsageError(
            f"no checkpoint under {root} is whole; {found[0].name}: {damage(found[0])[0]}",
            where="--resume",
            fix="restore the folder from a copy, or start again with another --output",
        )
    return whole


def load_state(folder: Path) -> dict[str, Any]:
    import torch

    return torch.load(folder / "state.pt", weights_only=True)


def damage(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, one sentence a file; empty when it is whole."""
    try:
        index = json.loads((folder / _INDEX).read_text())
    except (OSError, ValueError):
        return [f"{_INDEX} is missing or unreadable"]
    problems = []
    for name, (size, crc) in index.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != size:
            problems.append(f"{name} has {path.stat().st_size} bytes instead of {size}")
        elif _crc(path) != crc:
            problems.append(f"{name} has another checksum than when it was written")
    return problems


def step_of(folder: Path) -> int:
    match = _NAME.search(folder.name)
    if match is None:
        raise UsageError(f"{folder} is not a checkpoint folder (step-NNNNNN)")
    return int(match.group(1))


def checkpoints(root: Path) -> list[Path]:
    """Folders of checkpoints under `root`, whole or not."""
    if not root.is_dir():
        return []
    return [
        path
        for path in root.iterdir()
        if _NAME.search(path.name) and path.is_dir() and not path.is_symlink()
    ]


def write_index(folder: Path) -> None:
    """Lay down size and checksum of every file of a checkpoint, which makes it whole."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    write_json(
        folder / _INDEX,
        {str(path.relative_to(folder)): (path.stat().st_size, _crc(path)) for path in files},
    )


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
    return value


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _point(root: Path, name: str, target: Path) -> None:
    link = root / f"{name}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(root / name)


def _evict(root: Path, keep: int) -> None:
    best = (root / "best").resolve()
    for folder in sorted(checkpoints(root))[:-keep]:
        if folder.resolve() != best:
            shutil.rmtree(folder, ignore_errors=True)
    for leftover in root.glob("step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)
