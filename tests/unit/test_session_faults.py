"""A session that loses workers: new starts, their limits, a next step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.core.config import RunConfig
from rlx.core.engine.checkpoints import write_index
from rlx.core.engine.fault_ledger import FaultLedger
from rlx.core.engine.session import Session
from rlx.core.errors import EngineError, WorkerLostError
from rlx.core.plugins import PluginSystem
from rlx.core.run import Run

LOST = WorkerLostError("learner-0", "died during 'update'")


class Scripted(Session):
    """Loses its learner some times; notes the checkpoint that each attempt starts from."""

    def __init__(self, config: RunConfig, losses: int) -> None:
        selected: Any = SimpleNamespace(rewards=(), shipped_modules=list)
        super().__init__(
            config,
            selected=selected,
            trackers=[],
            plugins=PluginSystem.load(),
            checkpoint=None,
        )
        self.losses = losses
        self.attempts: list[str | None] = []

    async def _work(self, run: Run) -> str:
        self.attempts.append(self._checkpoint.name if self._checkpoint else None)
        self._crew.faults.phase = "update"
        if len(self.attempts) <= self.losses:
            (self._folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
            self._crew.faults.finished(2)
            raise LOST
        return "done"


def session(folder: Path, *, losses: int, **faults: Any) -> Scripted:
    config = RunConfig.model_validate({"output": folder, "faults": faults})
    return Scripted(config, losses)


def write_checkpoint(folder: Path, step: int) -> None:
    one = folder / "checkpoints" / f"step-{step:06d}"
    one.mkdir(parents=True)
    (one / "state.pt").write_text("state")
    write_index(one)


def test_loss_of_a_learner_ends_with_step_phase_worker_and_a_next_step(tmp_path: Path):
    write_checkpoint(tmp_path, 1)
    with pytest.raises(EngineError) as caught:
        asyncio.run(session(tmp_path, losses=1).run())
    assert str(caught.value) == (
        "step 3, update: the worker 'learner-0' died during 'update'; step-000001 is the last "
        f"whole checkpoint: the same command with `--resume --output {tmp_path}` goes on from "
        f"there. What the worker said last is in {tmp_path}/logs."
    )


def test_faults_name_the_step_that_the_phase_belongs_to(tmp_path: Path):
    ledger = FaultLedger(tmp_path, lambda text: None)
    said = []
    for phase in ("start", "update", "publish", "rollout"):
        ledger.phase = phase
        if phase == "publish":
            ledger.finished(1)
        said.append(ledger.where)
    assert said == ["step 1, start", "step 1, update", "step 1, publish", "step 2, rollout"]


def test_lost_learner_starts_the_run_anew_from_the_last_checkpoint(tmp_path: Path):
    write_checkpoint(tmp_path, 1)
    run = session(tmp_path, losses=2, learner="restart")
    assert asyncio.run(run.run()).reason == "done"
    assert run.attempts == [None, "step-000001", "step-000001"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'
    faults = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert [line["worker"] for line in faults] == ["learner-0"] * 2
    assert {line["phase"] for line in faults} == {"update"}
    assert "step-000001" in faults[0]["action"]


def test_new_starts_without_a_new_step_are_limited(tmp_path: Path):
    run = session(tmp_path, losses=9, learner="restart", learner_restarts=2)
    with pytest.raises(EngineError, match="starting anew 2 times did not lead to a new step"):
        asyncio.run(run.run())
    assert len(run.attempts) == 3
