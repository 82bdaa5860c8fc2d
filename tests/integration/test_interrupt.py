"""Ctrl-C, SIGTERM and a killed driver: a checkpoint that resumes, and no process left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from whole_runs import (
    arguments,
    descendants,
    left_over,
    metrics,
    run,
    start,
    wait_for_step,
    weights,
)

from rlx.core.engine.checkpoints import latest_checkpoint, step_of

pytestmark = pytest.mark.engine
MANY = 100_000


@pytest.mark.parametrize(
    ("runtime", "engine", "number", "whole_group"),
    [
        pytest.param("ray", "vllm", signal.SIGINT, True, id="ctrl-c-ray-vllm"),
        pytest.param("ray", "vllm", signal.SIGTERM, False, id="sigterm-ray-vllm"),
        pytest.param("inline", "vllm", signal.SIGINT, True, id="ctrl-c-inline-vllm"),
        pytest.param("inline", "transformers", signal.SIGTERM, False, id="sigterm-inline"),
    ],
)
def test_signal_ends_the_run_with_a_checkpoint(
    workspace: Path, runtime: str, engine: str, number: signal.Signals, whole_group: bool
):
    process = start(workspace, arguments("out", steps=MANY, runtime=runtime, engine=engine))
    wait_for_step(workspace, workspace / "out", 3)
    children = descendants(process)
    started = time.monotonic()
    if whole_group:  # what a terminal does on Ctrl-C
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    code = process.wait(30)
    seconds = time.monotonic() - started
    assert code == 128 + number, (workspace / "log.txt").read_text()[-3000:]
    assert seconds < 10
    assert "SIGTERM received at" not in (workspace / "log.txt").read_text()
    assert left_over(children) == []
    checkpoint = latest_checkpoint(workspace / "out/checkpoints")
    assert checkpoint is not None
    assert step_of(checkpoint) == metrics(workspace / "out")[-1]["step"]


@pytest.mark.parametrize("reward", ["digits", "slow_digits"])
def test_run_resumes_after_a_signal_as_if_it_had_not_been_stopped(workspace: Path, reward: str):
    """Whatever the run was doing: `slow_digits` makes it the middle of a step's rollouts."""

    def words(output: str, steps: int) -> list[str]:
        plain = arguments(output, steps=steps, runtime="inline", engine="transformers")
        return [word.replace("mypkg:digits", f"mypkg:{reward}") for word in plain]

    process = start(workspace, words("parts", MANY))
    wait_for_step(workspace, workspace / "parts", 2)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    steps = metrics(workspace / "parts")[-1]["step"] + 2
    run(workspace, [*words("parts", steps), "--resume"])
    run(workspace, words("whole", steps))
    assert metrics(workspace / "parts") == metrics(workspace / "whole")
    assert weights(workspace / "parts") == weights(workspace / "whole")


def test_signal_while_workers_start_leaves_nothing(workspace: Path):
    process = start(workspace, arguments("out", steps=3, runtime="ray", engine="vllm"))
    deadline = time.monotonic() + 60
    while "starting engine" not in (workspace / "log.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    children = descendants(process)
    assert children
    process.send_signal(signal.SIGINT)
    assert process.wait(15) == 128 + signal.SIGINT
    assert left_over(children) == []
    run(workspace, [*arguments("out", steps=2, runtime="ray", engine="vllm"), "--resume"])


@pytest.mark.slow
def test_killed_driver_leaves_no_process_and_a_whole_checkpoint(workspace: Path):
    """Inline: tests/integration/test_chaos.py."""
    words = arguments("out", steps=MANY, runtime="ray", engine="vllm")
    process = start(workspace, [*words, "--checkpoint-every", "2"])
    wait_for_step(workspace, workspace / "out", 5)
    children = descendants(process)
    process.kill()
    process.wait(10)
    assert left_over(children, patience=15) == []
    checkpoint = latest_checkpoint(workspace / "out/checkpoints")
    assert checkpoint is not None
    resumed = arguments("out", steps=step_of(checkpoint) + 2, runtime="ray", engine="vllm")
    run(workspace, [*resumed, "--resume"])
    steps = [record["step"] for record in metrics(workspace / "out")]
    assert steps == list(range(1, step_of(checkpoint) + 3))
