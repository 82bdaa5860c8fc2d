"""Evaluation of whole runs: training does not notice it, resume repeats it, `rlx eval` agrees."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from whole_runs import arguments, metrics, run, start, weights

pytestmark = pytest.mark.engine

EVAL = (
    "--eval-data test.jsonl --eval-every 2 --set eval.samples=4 --set eval.before_training=true "
    "--set eval.max_tasks=8 --set checkpoint.best=eval/test/mean --set checkpoint.keep=1"
).split()


def base(output: str, steps: int, engine: str = "transformers") -> list[str]:
    return arguments(output, steps=steps, runtime="inline", engine=engine)


def write_test_data(workspace: Path) -> None:
    rows = [{"prompt": f"{i}-{i}=", "label": "0"} for i in range(12)]
    (workspace / "test.jsonl").write_text("\n".join(map(json.dumps, rows)))


def split(records: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The training metrics of each step, and the metrics of each evaluation."""
    training = [{k: v for k, v in r.items() if not k.startswith("eval/")} for r in records]
    evals = [{k: v for k, v in r.items() if k == "step" or k.startswith("eval/")} for r in records]
    return [r for r in training if "reward/mean" in r], [r for r in evals if len(r) > 1]


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.slow)])
def test_training_does_not_notice_evaluation(workspace: Path, engine: str):
    write_test_data(workspace)
    run(workspace, base("without", 3, engine))
    run(workspace, [*base("with", 3, engine), *EVAL])
    training, evals = split(metrics(workspace / "with"))
    assert training == metrics(workspace / "without")
    assert weights(workspace / "with") == weights(workspace / "without")
    assert [record["step"] for record in evals] == [0, 2, 3]
    assert {record["eval/test/length_mean"] > 0 for record in evals} == {True}
    samples = (workspace / "with/evals/step-000002.jsonl").read_text().splitlines()
    assert len(samples) == 8 * 4


@pytest.mark.slow
def test_a_resumed_run_evaluates_as_the_whole_one_and_keeps_its_best(workspace: Path):
    write_test_data(workspace)
    run(workspace, [*base("whole", 6), *EVAL])
    run(workspace, [*base("parts", 4), *EVAL])
    run(workspace, [*base("parts", 6), *EVAL, "--resume"])
    assert metrics(workspace / "parts") == metrics(workspace / "whole")
    _, evals = split(metrics(workspace / "whole"))
    best = max(evals, key=lambda record: record["eval/test/mean"])["step"]
    for name in ("whole", "parts"):
        folder = workspace / name / "checkpoints"
        assert (folder / "best").readlink() == Path(f"step-{best:06d}")
        assert (folder / "best" / "model" / "config.json").is_file()
        kept = {path.name for path in folder.glob("step-*")}
        assert kept == {f"step-{best:06d}", "step-000006"}


SLOW_REWARD = """
import time
from pathlib import Path

def digits(sample):
    if "-" in sample.prompt and Path("slow").exists():
        time.sleep(0.5)
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
"""


@pytest.mark.slow
def test_an_interrupted_evaluation_is_made_up_for(workspace: Path):
    write_test_data(workspace)
    (workspace / "slowly.py").write_text(SLOW_REWARD)

    def words(output: str) -> list[str]:
        plain = [*base(output, 3), "--eval-data", "test.jsonl", "--eval-every", "2"]
        return [word.replace("mypkg:", "slowly:") for word in plain]

    run(workspace, words("whole"))
    (workspace / "slow").touch()
    (workspace / "log.txt").unlink()
    process = start(workspace, words("parts"))
    deadline = time.monotonic() + 60
    while "evaluating" not in (workspace / "log.txt").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert [record["step"] for record in metrics(workspace / "parts")] == [1, 2]
    (workspace / "slow").unlink()
    run(workspace, [*words("parts"), "--resume"])
    assert weights(workspace / "parts") == weights(workspace / "whole")
    whole, parts = (split(metrics(workspace / name)) for name in ("whole", "parts"))
    assert parts == whole
    assert [record["step"] for record in metrics(workspace / "parts")] == [1, 2, 2, 3]


def test_rlx_eval_gives_what_training_reported(workspace: Path):
    write_test_data(workspace)
    run(workspace, [*base("out", 2), *EVAL])
    _, evals = split(metrics(workspace / "out"))
    text = run(workspace, ["eval", "out"])
    folder = workspace / "out" / "evals" / "step-000002-1"
    results = json.loads((folder / "results.json").read_text())
    found = results["sources"]["test"]
    assert found["mean"] == evals[-1]["eval/test/mean"]
    assert found["pass@k"]["4"] == evals[-1]["eval/test/pass@4"]
    assert (results["step"], found["tasks"], found["rollouts"]) == (2, 8, 32)
    assert len((folder / "samples.jsonl").read_text().splitlines()) == 32
    assert "pass@4" in text
    assert "next:" in text


def test_several_sources_are_drawn_and_reported_apart(workspace: Path):
    write_test_data(workspace)
    sources = "[{path: data.jsonl, probability: 0.75}, {path: test.jsonl, probability: 0.25}]"
    words = [*base("out", 2), "--set", f"data.sources={sources}", "--set", "data.path=embedded"]
    run(workspace, words)
    for record in metrics(workspace / "out"):
        assert record["source/data/share"] == 0.75
        assert record["source/test/share"] == 0.25
        assert record["sampler/pass_rate/test"] == 1.0
