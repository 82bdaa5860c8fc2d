"""Runs that something happens to: a number that is not finite, a stop while weights change."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from whole_runs import arguments, metrics, run, start, wait_for_step

from rlx.core.engine.checkpoints import latest_checkpoint, step_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LOSSES = '''
import time

spoiled = []


def nan_once(x):
    """The policy gradient; not a number in the fourth step, the first time that it comes."""
    if x.metadata["step"] == 3 and not spoiled:
        spoiled.append(1)
        return -x.ratio * x.advantages * float("nan")
    return -x.ratio * x.advantages


def slow(x):
    """The policy gradient, two seconds for each micro-batch from the third step on."""
    if x.metadata["step"] >= 2:
        with open("calls.txt", "a") as calls:
            calls.write("x")
        time.sleep(2.0)
    return -x.ratio * x.advantages
'''


def words(folder: Path, loss: str, *, steps: int) -> list[str]:
    (folder / "losses.py").write_text(LOSSES)
    plain = arguments("out", steps=steps, runtime="inline", engine="transformers")
    return [*plain, "--loss", f"losses:{loss}"]


def test_rollback_goes_on_from_the_last_checkpoint_with_other_tasks(workspace: Path):
    more = "--checkpoint-every 1 --set faults.divergence=rollback --set logging.rollouts=complete"
    text = run(workspace, [*words(workspace, "nan_once", steps=5), *more.split()])
    assert "going back to step-000003" in text
    records = metrics(workspace / "out")
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5]
    assert records[3]["faults/rollbacks"] == 1
    groups = [
        {json.loads(line)["group"] for line in path.read_text().splitlines()}
        for path in sorted((workspace / "out" / "rollouts").glob("step-*.jsonl"))
    ]
    assert groups[2] == set(range(8, 12))
    assert groups[3] == set(range(16, 20)), "the groups of the spoiled step are not made again"


def test_kill_between_a_checkpoint_and_its_line_of_metrics_loses_no_line(workspace: Path):
    plain = arguments("out", steps=3, runtime="inline", engine="transformers")
    long = [*plain, *"--checkpoint-every 1 --set checkpoint.keep=5".split()]
    run(workspace, long)
    before, out = metrics(workspace / "out"), workspace / "out"
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text(lines[0])  # as if killed right after step-000002
    (out / "finished.json").unlink()
    shutil.rmtree(out / "checkpoints" / "step-000003")
    run(workspace, [*long, "--resume"])
    assert metrics(out) == before


def test_stop_in_a_long_update_loses_at_most_its_step(workspace: Path):
    """Eight optimizer steps of two seconds each: more than what an interrupted run has for
    anything but saving."""
    long = [*words(workspace, "slow", steps=50), "--set", "learner.minibatch_size=2"]
    process = start(workspace, long)
    wait_for_step(workspace, workspace / "out", 2)
    calls = workspace / "calls.txt"
    while not calls.exists() or len(calls.read_text()) < 2:
        time.sleep(0.05)
    # The second optimizer step of the third update is under way: weights have changed.
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    assert time.monotonic() - began > 9.5
    checkpoint = latest_checkpoint(workspace / "out" / "checkpoints")
    assert checkpoint is not None
    assert step_of(checkpoint) == metrics(workspace / "out")[-1]["step"] == 3
