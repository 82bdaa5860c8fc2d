"""Checkpoints: whole or absent, verified, evicted last."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rlx.core.engine.checkpoints import (
    damage,
    latest_checkpoint,
    load_state,
    resumable_checkpoint,
    save_checkpoint,
    step_of,
)
from rlx.core.errors import EngineError, UsageError


async def write_two_files(folder: str) -> None:
    for name in ("policy", "model"):
        path = Path(folder) / name
        path.mkdir()
        (path / "weights").write_bytes(b"w" * 100)


def save(root: Path, step: int, *, keep: int = 2, write=write_two_files, state=None) -> Path:
    return asyncio.run(save_checkpoint(root, step, state or {"step": step}, write, keep=keep))


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
        job = save_checkpoint(tmp_path, step, {}, write_two_files, keep=1, best=best)
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
    asyncio.run(save_checkpoint(tmp_path, 3, {}, write_two_files, keep=1, best=2))
    assert not (tmp_path / "best").is_symlink()
