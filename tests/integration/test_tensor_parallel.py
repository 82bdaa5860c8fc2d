"""A whole run whose engine is split over two processes."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest
from whole_runs import arguments, descendants, left_over, metrics, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_both_halves_of_an_engine_take_new_weights_and_end_with_the_run(workspace: Path) -> None:
    """Ray, vLLM with two workers (60 s on one core)."""
    words = arguments("out", steps=2, runtime="ray", engine="vllm")
    run = start(workspace, [*words, "--set", "rollout.tensor_parallel=2"])
    workers: list[psutil.Process] = []
    try:
        while run.poll() is None:
            found = [one for one in descendants(run) if "VLLM::Worker_TP" in _title(one)]
            workers = max(workers, found, key=len)
            time.sleep(0.5)
    finally:
        if run.poll() is None:
            run.kill()
    assert run.returncode == 0, (workspace / "log.txt").read_text()[-3000:]
    assert len(workers) == 2
    gaps = [record["mismatch/logprob_abs_max"] for record in metrics(workspace / "out")]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4, "an engine with old weights is off by more"
    assert not left_over(workers)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""
