"""Engines that are killed while they take new weights, and whole runs over TCP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import metrics, run, weights

from rlx.core.engine.checkpoints import latest_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 4
RUN = (
    f"train --engine transformers --steps {STEPS} --groups 4 --group-size 4 --max-new-tokens 8 "
    "--set eval.sources=[] --set eval.every=0 --set publication.bucket_mib=1 --checkpoint-every 1"
)
KILLS_ITSELF = """
import os
import pathlib
import signal

import rlx

@rlx.hookimpl
def rlx_on_worker_start(ctx):
    '''The first rollout engine ends with the first bucket of the weights after step 3.'''
    mark = pathlib.Path(ctx.run_folder) / "killed-after"
    if ctx.role != "rollout" or mark.exists():
        return
    from rlx.core.engine.transfer.receiver import Receiver

    whole = Receiver.buckets

    def buckets(self, publication, *, complete):
        for tensors in whole(self, publication, complete=complete):
            yield tensors
            if publication == 2:
                mark.write_text(" ".join(tensors))
                os.kill(os.getpid(), signal.SIGKILL)

    Receiver.buckets = buckets
"""


@pytest.fixture(scope="module")
def left_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the run to which nothing happens."""
    folder = tmp_path_factory.mktemp("alone")
    run(folder, [*RUN.split(), "--runtime", "inline", "--output", "out"])
    return folder / "out"


def killed(folder: Path, *more: str, code: int = 0) -> tuple[str, list[dict[str, Any]]]:
    """What a run printed whose engine is killed in a publication, and the lines of its faults."""
    (folder / "rlxfile.py").write_text(KILLS_ITSELF)
    text = run(folder, [*RUN.split(), "--runtime", "ray", "--output", "out", *more], code=code)
    loaded = set((folder / "out" / "killed-after").read_text().split())
    assert 0 < len(loaded) < len(tensor_names(folder / "out")), "it was killed in the middle"
    faults = folder / "out" / "faults.jsonl"
    lines = faults.read_text().splitlines() if faults.is_file() else []
    return text, [json.loads(line) for line in lines]


def tensor_names(folder: Path) -> list[str]:
    from safetensors import safe_open

    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    with safe_open(checkpoint / "model" / "model.safetensors", "pt") as file:
        return list(file.keys())


def same_steps(folder: Path, other: Path) -> bool:
    def without_faults(record: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in record.items() if not key.startswith("faults/")}

    steps, others = metrics(folder), metrics(other)
    return len(steps) == STEPS and list(map(without_faults, steps)) == others


def test_through_shared_memory_a_new_engine_takes_the_same_weights(
    tmp_path: Path, left_alone: Path
):
    """No request was under way, so that nothing may be different afterwards."""
    _, faults = killed(tmp_path)
    (fault,) = faults
    assert (fault["fault"], fault["phase"], fault["step"]) == ("engine_restarts", "publish", 3)
    assert "died during 'load_weights'" in fault["cause"]
    assert same_steps(tmp_path / "out", left_alone)
    assert weights(tmp_path / "out") == weights(left_alone)


def test_over_tcp_the_run_goes_back_to_the_checkpoint_and_ends_with_the_same_weights(
    tmp_path: Path, left_alone: Path
):
    more = "--set publication.transport=gloo --set faults.learner=restart"
    _, faults = killed(tmp_path, *more.split())
    (fault,) = faults
    assert (fault["fault"], fault["phase"], fault["step"]) == ("learner_restarts", "publish", 3)
    assert "'gloo' keeps no weights" in fault["cause"]
    assert fault["action"] == "starting all workers anew from step-000002"
    assert same_steps(tmp_path / "out", left_alone)
    assert weights(tmp_path / "out") == weights(left_alone)
