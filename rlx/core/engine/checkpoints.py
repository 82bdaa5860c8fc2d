"""Checkpoints of a run: written aside, verified, synced, renamed; only then are old ones evicted.

checkpoints/step-000100/
  state.pt       driver: step, sampler, counters, component state
  policy/        learner: weights, optimizer, random state (`learner/checkpoint.py`)
  critic/        the same of the critic, if there is one
  model/         Hugging Face folder of the policy; of a policy with adapters, adapter/ alone
  files.json     size and CRC-32 of every file above, written last
checkpoints/latest -> step-000100
checkpoints/best -> step-000080     never evicted

Whatever ends in `.partial` is unfinished, or was on its way out when the run was killed.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import re
import shutil
import zlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rlx.core.engine.interfaces import FileMarks
from rlx.core.errors import EngineError, RlxError, UsageError
from rlx.core.run import write_json

_NAME = re.compile(r"step-(\d+)$")
_INDEX = "files.json"
_BLOCK = 1 << 22
_NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF)
"""What file systems say that can't sync a folder."""


class CheckpointError(EngineError):
    """A checkpoint can't be written."""


def packed_state(state: Mapping[str, Any]) -> bytes:
    """The driver's state as it is now, of primitives, containers of them, and tensors.

    Raises:
        UnpicklingError: something else is in it, which `load_state` would refuse.
    """
    import torch

    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return buffer.getvalue()


async def save_checkpoint(
    root: Path,
    step: int,
    state: bytes,
    write_model: Callable[[str], Awaitable[FileMarks]],
    *,
    keep: int,
    best: int | None = None,
) -> Path:
    """Write `root/step-NNNNNN` and return it.

    Args:
        state: what `packed_state` gave.
        write_model: writes `policy/`, `critic/` and `model/` (`adapter/`) into the folder it is
            given, and returns what it meant to write.
        keep: how many of the newest checkpoints stay, the new one included.
        best: step whose checkpoint stays besides; `root/best` points to it.

    Raises:
        CheckpointError: it can't be written whole; older ones are then untouched.
        RlxError: a worker failed meanwhile.
    """
    final = root / _folder_name(step)
    aside = root / f"{final.name}.partial"
    try:
        await asyncio.to_thread(_make_anew, aside)
        marks = await write_model(str(aside))
        await asyncio.to_thread(_complete, aside, final, state, marks)
    except Exception as error:
        await asyncio.to_thread(shutil.rmtree, aside, ignore_errors=True)
        if isinstance(error, RlxError):
            raise
        said = error.strerror if isinstance(error, OSError) else None
        raise CheckpointError(f"can't write the checkpoint {final}: {said or error}") from error
    await asyncio.to_thread(_tidy, root, final, keep, best)
    return final


def _make_anew(aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)


def _complete(aside: Path, final: Path, state: bytes, marks: FileMarks) -> None:
    """Verify what lies in `aside`, sync it, and give it its name."""
    (aside / "state.pt").write_bytes(state)
    write_index(aside, {**marks, "state.pt": (len(state), zlib.crc32(state))})
    for folder in (*(path for path in aside.rglob("*") if path.is_dir()), aside):
        _sync_folder(folder)
    if final.exists():
        _remove(final)
    aside.rename(final)
    _sync_folder(final.parent)


def _tidy(root: Path, newest: Path, keep: int, best: int | None) -> None:
    """Point to the new checkpoint, then evict old ones."""
    _point(root, "latest", newest)
    if best is not None and (root / _folder_name(best)).is_dir():
        _point(root, "best", root / _folder_name(best))
    _evict(root, newest, keep)


def latest_checkpoint(root: Path, *, at_most: int | None = None) -> Path | None:
    """The newest whole checkpoint under `root`, of step `at_most` or before; damaged ones are
    passed over."""
    for folder in sorted(checkpoints(root), key=step_of, reverse=True):
        if (at_most is None or step_of(folder) <= at_most) and not damage(folder):
            return folder
    return None


def resumable_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint; None when none was ever written.

    Raises:
        UsageError: there are checkpoints, and every one of them is damaged.
    """
    whole = latest_checkpoint(root)
    found = sorted(checkpoints(root), key=step_of, reverse=True)
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


def write_index(folder: Path, marks: FileMarks | None = None) -> None:
    """Lay down size and checksum of every file of a checkpoint, which makes it whole.

    Every file is read back and synced before. `marks`: what some of them must turn out to be.

    Raises:
        CheckpointError: a file is not what was meant to be written.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    index = {str(path.relative_to(folder)): (path.stat().st_size, _crc(path)) for path in files}
    for name, meant in (marks or {}).items():
        if index.get(name) != tuple(meant):
            raise CheckpointError(
                f"{folder / name} is not what was written: {index.get(name)} instead of {meant} "
                "(bytes, CRC-32)"
            )
    write_json(folder / _INDEX, index)
    _crc(folder / _INDEX)


def _crc(path: Path) -> int:
    """CRC-32 of a file, which is on the disk afterwards."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            value = zlib.crc32(block, value)
        os.fsync(file.fileno())
    return value


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def _folder_name(step: int) -> str:
    return f"step-{step:06d}"


def _point(root: Path, name: str, target: Path) -> None:
    link = root / f"{name}.partial"
    link.unlink(missing_ok=True)
    link.symlink_to(target.name)
    link.replace(root / name)


def _evict(root: Path, newest: Path, keep: int) -> None:
    """Leave the newest and the best. Those of later steps are no successors of it: the run went on
    from an earlier checkpoint than them, because they are damaged or led nowhere."""
    step = step_of(newest)
    best = (root / "best").resolve()
    if _NAME.search(best.name) and step_of(best) > step:
        (root / "best").unlink()
        best = newest
    found = sorted(checkpoints(root), key=step_of)
    kept = [folder for folder in found if step_of(folder) <= step][-keep:]
    for folder in found:
        if folder not in kept and folder.resolve() != best:
            _remove(folder)
    for leftover in root.glob("step-*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Under another name first: a kill half-way leaves no damaged checkpoint."""
    aside = folder.with_name(f"{folder.name}.old.partial")
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
