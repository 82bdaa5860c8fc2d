"""Checkpoints beside training: one at a time, of the moment they were asked for, none harmed."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rlx.core.config import CheckpointConfig
from rlx.core.engine.checkpointing import Checkpointing, Models
from rlx.core.engine.checkpoints import checkpoints, damage, latest_checkpoint, load_state
from rlx.core.engine.interfaces import FileMarks
from rlx.core.engine.learner.tensor_file import write_tensors
from rlx.core.errors import EngineError


class Model:
    """A model of one tensor; its writing waits for `gate`."""

    def __init__(self, size: int = 4) -> None:
        self.weights = torch.zeros(size)
        self.gate = asyncio.Event()
        self.gate.set()
        self.held: torch.Tensor | None = None
        self.writing = 0
        self.most_writing = 0

    async def hold(self, *, copy: bool, export: bool) -> None:
        self.held = self.weights.clone() if copy else self.weights

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        held, self.held = self.held, None
        assert held is not None
        self.writing += 1
        self.most_writing = max(self.most_writing, self.writing)
        await self.gate.wait()
        Path(state).mkdir()
        mark = write_tensors(Path(state) / "w.safetensors", {"w": held})
        self.writing -= 1
        return {"w.safetensors": mark}


class Case:
    def __init__(self, root: Path, *, size: int = 4, **settings: Any) -> None:
        self.root = root
        self.model = Model(size)
        self.written: list[int] = []
        self.said: list[str] = []
        self.checkpoints = Checkpointing(
            root,
            CheckpointConfig.model_validate({"asynchronous": True, **settings}),
            Models(policy=self.model, folder="model"),
            status=self.said.append,
            written=lambda step, path: self.written.append(step),
        )

    async def step(self, step: int, *, last: bool = False) -> None:
        self.model.weights += 1
        await self.checkpoints.save(step, {"step": step}, best=None, last=last)


def weights_of(root: Path) -> float:
    from safetensors.torch import load_file

    folder = latest_checkpoint(root)
    assert folder is not None
    assert load_state(folder)["step"] == float(load_file(folder / "policy/w.safetensors")["w"][0])
    return float(load_state(folder)["step"])


def test_training_goes_on_while_it_is_written_and_does_not_change_it(tmp_path: Path):
    async def run() -> None:
        case = Case(tmp_path)
        case.model.gate.clear()
        await case.step(1)
        case.model.weights += 10
        assert case.written == []
        assert latest_checkpoint(tmp_path) is None
        case.model.gate.set()
        await case.checkpoints.settle()
        assert case.written == [1]
        assert set(case.checkpoints.take_metrics()) == {"time/checkpoint_write"}
        assert case.checkpoints.take_metrics() == {}

    asyncio.run(run())
    assert weights_of(tmp_path) == 1.0


def test_the_next_one_and_the_last_one_wait_for_it(tmp_path: Path):
    async def run() -> None:
        case = Case(tmp_path)
        for step in (1, 2, 3):
            await case.step(step)
        await case.step(4, last=True)
        assert case.written == [1, 2, 3, 4]
        assert case.model.most_writing == 1
        await case.step(4, last=True)  # it is there
        assert case.written == [1, 2, 3, 4]

    asyncio.run(run())
    assert weights_of(tmp_path) == 4.0


def test_the_end_waits_for_one_of_the_same_step_that_is_under_way(tmp_path: Path):
    async def run() -> None:
        case = Case(tmp_path)
        case.model.gate.clear()
        await case.step(1)
        end = asyncio.create_task(case.checkpoints.save(1, {"step": 1}, best=None, last=True))
        await asyncio.sleep(0.05)
        assert not end.done()
        case.model.gate.set()
        await end
        assert case.written == [1]

    asyncio.run(run())


def fails_at(case: Case, step: int) -> None:
    """Writing fails once, when `step` is saved."""
    original = case.model.write_held

    async def write_held(state: str, model: str | None) -> FileMarks:
        if f"step-{step:06d}" in state:
            raise OSError(5, "Input/output error")
        return await original(state, model)

    case.model.write_held = write_held  # type: ignore[method-assign]


async def fail(case: Case) -> None:
    """What a trainer does: save, and look after it before the next step."""
    await case.step(2)
    await case.checkpoints.close()
    case.checkpoints.check()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_ends_the_run_at_the_next_step(tmp_path: Path, asynchronous: bool):
    async def run() -> None:
        case = Case(tmp_path, asynchronous=asynchronous)
        await case.step(1)
        fails_at(case, 2)
        with pytest.raises(EngineError, match=r"step-000002: Input/output error"):
            await fail(case)
        case.checkpoints.check()  # said once

    asyncio.run(run())
    assert weights_of(tmp_path) == 1.0


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failure_is_counted_and_the_run_goes_on(tmp_path: Path, asynchronous: bool):
    async def run() -> None:
        case = Case(tmp_path, asynchronous=asynchronous, on_failure="continue")
        await case.step(1)
        fails_at(case, 2)
        for step in (2, 3):
            await case.step(step)
        await case.checkpoints.settle()
        assert case.checkpoints.take_metrics()["checkpoint/failed"] == 1.0
        assert any("step 2 was not written" in text for text in case.said)
        assert case.written == [1, 3]

    asyncio.run(run())
    assert weights_of(tmp_path) == 3.0


def test_the_last_checkpoint_must_succeed_whatever_the_setting(tmp_path: Path):
    async def run() -> None:
        case = Case(tmp_path, on_failure="continue")
        fails_at(case, 1)
        with pytest.raises(EngineError, match="Input/output error"):
            await case.step(1, last=True)

    asyncio.run(run())


def test_a_failed_step_is_tried_again_at_the_end(tmp_path: Path):
    async def run() -> None:
        case = Case(tmp_path, on_failure="continue")
        original = case.model.write_held
        fails_at(case, 1)
        await case.step(1)
        await case.checkpoints.close()
        case.model.write_held = original  # type: ignore[method-assign]
        case.checkpoints.check()
        await case.checkpoints.save(1, {"step": 1}, best=None, last=True)
        assert case.written == [1]

    asyncio.run(run())


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_harms_no_earlier_checkpoint(small_disk: Path):
    """One checkpoint of 640 KiB fits, a second one does not; when there is room again, it does."""

    async def run() -> None:
        case = Case(small_disk / "checkpoints", size=160 * 1024, keep=1, on_failure="continue")
        await case.step(1)
        await case.step(2)
        await case.checkpoints.close()
        assert any("No space left on device" in text for text in case.said)
        assert weights_of(case.root) == 1.0
        assert not list(case.root.glob("*.partial"))
        assert not damage(case.root / "step-000001")
        case.model.weights = torch.full((100,), 2.0)
        await case.step(3, last=True)
        assert [path.name for path in checkpoints(case.root)] == ["step-000003"]

    asyncio.run(run())
    assert weights_of(small_disk / "checkpoints") == 3.0
