"""Checkpoints: whole or absent, verified, evicted last."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.core.engine.checkpoints import (
    checkpoints,
    damage,
    latest_checkpoint,
    load_state,
    packed_state,
    resumable_checkpoint,
    save_checkpoint,
    step_of,
)
from rlx.core.engine.interfaces import FileMarks
from rlx.core.errors import EngineError, UsageError


async def write_two_files(folder: str) -> FileMarks:
    for name in ("policy", "model"):
        path = Path(folder) / name
        path.mkdir()
        (path / "weights").write_bytes(b"w" * 100)
    return {"policy/weights": (100, zlib.crc32(b"w" * 100))}


def save(root: Path, step: int, *, keep: int = 2, write=write_two_files, state=None) -> Path:
    packed = packed_state(state or {"step": step})
    return asyncio.run(save_checkpoint(root, step, packed, write, keep=keep))


def test_state_comes_back(tmp_path: Path):
    state = {"step": 3, "collector": {"next_group": 7, "sampler": {"order": [1, 2]}}}
    folder = save(tmp_path, 3, state=state)
    assert load_state(folder) == state
    assert step_of(folder) == 3
    assert (tmp_path / "latest").resolve() == folder.resolve()


def test_old_checkpoints_go_after_the_new_one_is_whole(tmp_path: Path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-000003"]


def test_failed_write_leaves_the_earlier_checkpoint(tmp_path: Path):
    save(tmp_path, 1)

    async def full_disk(folder: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(EngineError, match="No space left on device"):
        save(tmp_path, 2, keep=1, write=full_disk)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("harm", ["truncate", "change", "remove", "index"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, harm: str):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)
    weights = folder / "policy" / "weights"
    if harm == "truncate":
        weights.write_bytes(b"w" * 50)
    elif harm == "change":
        weights.write_bytes(b"x" * 100)
    elif harm == "remove":
        weights.unlink()
    else:
        (folder / "files.json").write_text("{")
    assert damage(folder)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_resume_refuses_when_every_checkpoint_is_damaged(tmp_path: Path):
    assert resumable_checkpoint(tmp_path) is None
    folder = save(tmp_path, 1)
    assert resumable_checkpoint(tmp_path) == folder
    (folder / "state.pt").unlink()
    with pytest.raises(UsageError, match=r"step-000001: state\.pt is missing"):
        resumable_checkpoint(tmp_path)


def test_folder_without_a_step_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="not a checkpoint"):
        step_of(tmp_path)


def test_the_best_checkpoint_stays_and_is_pointed_to(tmp_path: Path):
    def save_best(step: int, best: int | None) -> None:
        job = save_checkpoint(tmp_path, step, packed_state({}), write_two_files, keep=1, best=best)
        asyncio.run(job)

    for step, best in ((1, None), (2, 2), (3, 2), (4, 2)):
        save_best(step, best)
    kept = sorted(path.name for path in tmp_path.glob("step-*"))
    assert kept == ["step-000002", "step-000004"]
    assert (tmp_path / "best").readlink() == Path("step-000002")
    assert (tmp_path / "latest").readlink() == Path("step-000004")
    save_best(5, 5)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000005"]


def test_a_best_checkpoint_that_is_gone_is_not_pointed_to(tmp_path: Path):
    asyncio.run(save_checkpoint(tmp_path, 3, packed_state({}), write_two_files, keep=1, best=2))
    assert not (tmp_path / "best").is_symlink()


def test_a_file_that_is_not_what_was_meant_fails_the_checkpoint(tmp_path: Path):
    async def write_less(folder: str) -> FileMarks:
        await write_two_files(folder)
        return {"policy/weights": (101, 0)}

    save(tmp_path, 1)
    with pytest.raises(EngineError, match=r"policy/weights is not what was written"):
        save(tmp_path, 2, write=write_less)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_checkpoints_of_an_abandoned_future_are_not_kept_in_place_of_the_new_one(tmp_path: Path):
    """Step 20 is damaged, the run goes on from step 10 and saves step 15."""
    for step in (10, 20):
        save(tmp_path, step, keep=2)
    (tmp_path / "step-000020" / "state.pt").write_bytes(b"")
    folder = save(tmp_path, 15, keep=1)
    assert latest_checkpoint(tmp_path) == folder == (tmp_path / "latest").resolve()
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000015"]


def test_the_best_of_an_abandoned_future_is_forgotten(tmp_path: Path):
    save(tmp_path, 1)
    asyncio.run(save_checkpoint(tmp_path, 4, packed_state({}), write_two_files, keep=2, best=4))
    save(tmp_path, 2)
    assert not (tmp_path / "best").is_symlink()
    assert sorted(path.name for path in checkpoints(tmp_path)) == ["step-000001", "step-000002"]


def test_newest_is_told_by_number_and_not_by_name(tmp_path: Path):
    save(tmp_path, 999_999)
    folder = save(tmp_path, 1_000_000, keep=1)
    assert latest_checkpoint(tmp_path) == folder
    assert checkpoints(tmp_path) == [folder]


class Killed(BaseException):
    """Nothing in rlx catches it, and nothing is cleaned up after it, as after SIGKILL."""


CALLS = [
    (os, "fsync"),
    (os, "rename"),
    (os, "replace"),
    (os, "symlink"),
    (os, "rmdir"),
    (os, "unlink"),
    (Path, "write_bytes"),
    (Path, "write_text"),
    (Path, "mkdir"),
    (shutil, "rmtree"),
]


def kill_at(monkeypatch: pytest.MonkeyPatch, number: int) -> Callable[[], int]:
    """Let the file system fail for good at the `number`-th call; returns how many there were."""
    count = 0

    def guarded(function: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **kwargs: object) -> object:
            nonlocal count
            count += 1
            if count >= number:
                raise Killed
            return function(*args, **kwargs)

        return call

    for owner, name in CALLS:
        monkeypatch.setattr(owner, name, guarded(getattr(owner, name)))
    return lambda: count


def test_a_kill_at_any_moment_leaves_a_whole_checkpoint(tmp_path: Path):
    """Every call that changes the disk is in turn the last one before the process is gone."""
    newest, number = [], 0
    while True:
        number += 1
        root = tmp_path / str(number)
        for step in (1, 2):
            save(root, step, keep=1)
        with pytest.MonkeyPatch.context() as patch:
            calls = kill_at(patch, number)
            with contextlib.suppress(Killed):
                save(root, 3, keep=1)
        whole = latest_checkpoint(root)
        assert whole is not None, f"killed at call {number}"
        assert not [path for path in checkpoints(root) if damage(path)], f"killed at call {number}"
        newest.append(step_of(whole))
        assert step_of(save(root, 4, keep=1)) == 4  # what was left behind is no obstacle
        assert sorted(path.name for path in root.glob("step-*")) == ["step-000004"]
        if calls() < number:
            break
    assert number > 15
    assert newest == sorted(newest)
    assert (newest[0], newest[-1]) == (2, 3)
