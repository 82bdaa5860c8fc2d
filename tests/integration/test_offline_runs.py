"""Whole offline runs through the command line: killed and resumed, over ranks, used by others."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from whole_runs import metrics, run, start, wait_for_step, weights

from rlx.core.engine.checkpoints import latest_checkpoint, step_of
from rlx.core.run import truncate_metrics

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture
def data(workspace: Path) -> Path:
    """The workspace with judged answers and pairs, a row of each that can't be trained on."""
    judged = [
        {"prompt": f"{i % 7}+{i}=", "completion": str(i + (i % 7) * (i % 2)), "label": i % 2 == 1}
        for i in range(40)
    ]
    pairs = [
        {"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": f"{i}, maybe"} for i in range(40)
    ]
    write(workspace / "judged.jsonl", [*judged, {**judged[0], "completion": ""}])
    write(workspace / "pairs.jsonl", [*pairs, {**pairs[0], "rejected": pairs[0]["chosen"]}])
    return workspace


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_killed_run_is_resumed_in_mid_epoch_bit_by_bit(data: Path) -> None:
    """Reference log-probs, mismatched answers, a schedule and evaluation included; checkpoints are
    written beside training (about 30 s)."""

    def words(output: str) -> list[str]:
        return (
            "kto --model tiny --data judged.jsonl --eval-data judged.jsonl --eval-every 4 "
            "--runtime inline --epochs 2 --batch-size 8 --checkpoint-every 1 --lr 1e-3 "
            f"--set checkpoint.keep=4 --output {output}"
        ).split()

    said = run(data, words("whole"))
    assert "1 of 41 rows left out: empty answers" in said
    process = start(data, [*words("killed"), "--set", "checkpoint.asynchronous=true"])
    try:
        wait_for_step(data, data / "killed", 3)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert not (data / "killed" / "finished.json").exists()
    # As if the kill had come between the newest checkpoint and its step's line of metrics.
    newest = latest_checkpoint(data / "killed" / "checkpoints")
    assert newest is not None
    truncate_metrics(data / "killed", step_of(newest) - 1)
    said = run(data, ["kto", "--resume", "--output", "killed"])
    assert "resuming from step-0000" in said
    assert weights(data / "killed") == weights(data / "whole")
    assert metrics(data / "killed") == metrics(data / "whole")
    losses = [record["train/loss"] for record in metrics(data / "whole")]
    assert len(losses) == 10
    assert len({record["train/lr"] for record in metrics(data / "whole")}) == 10


def test_reward_model_serves_reinforcement_learning_and_starts_a_critic(data: Path) -> None:
    """Trained, kept where it did best (once that is spelt right), loaded by transformers, used by
    `train` (about 35 s)."""
    from transformers import AutoModelForSequenceClassification

    words = (
        "rm --model tiny --data pairs.jsonl --eval-data pairs.jsonl --eval-every 2 --steps 12 "
        "--batch-size 16 --lr 3e-3 --runtime inline --output rm"
    ).split()
    said = run(data, [*words, "--best", "eval/pairs/acuracy"], code=2)
    assert "did you mean 'eval/pairs/accuracy'?" in said
    assert not metrics(data / "rm"), "it ends before the first step"
    assert not list((data / "rm").glob("checkpoints/step-*"))
    run(data, [*words, "--best", "eval/pairs/accuracy"])
    last = metrics(data / "rm")[-1]
    assert last["eval/pairs/accuracy"] > 0.9
    assert (data / "rm" / "checkpoints" / "best").is_symlink()
    loaded = AutoModelForSequenceClassification.from_pretrained(data / "rm" / "export")
    assert loaded.config.num_labels == 1
    assert loaded.config.rlx_reward_std > 0
    mean = (last["eval/pairs/reward_chosen"] + last["eval/pairs/reward_rejected"]) / 2
    assert loaded.config.rlx_reward_mean == pytest.approx(mean, abs=1e-4)
    run(
        data,
        "train --model tiny --data data.jsonl --reward model:rm/export --runtime inline "
        "--engine transformers --steps 1 --groups 2 --group-size 2 --max-new-tokens 4 "
        "--estimator gae --set critic.model=rm/export --output rl".split(),
    )
    (record,) = metrics(data / "rl")
    scale = loaded.config.rlx_reward_std
    normalised = (record["export/raw"] - loaded.config.rlx_reward_mean) / scale
    assert record["reward/export"] == pytest.approx(normalised, abs=1e-4)
    assert record["critic/value_mean"] != 0, "its head is the reward model's"


def test_two_ranks_under_ray_train_as_one_process_which_can_take_over(data: Path) -> None:
    """With a reference; after three of five steps one rank under another ZeRO stage goes on, in
    mid-epoch (about 50 s)."""
    common = "dpo --model tiny --data pairs.jsonl --batch-size 8 --lr 1e-3".split()
    common += ["--set", "learner.schedule=constant"]  # one that ends with `--steps` would differ
    alone = ["--runtime", "inline", "--ranks", "1", "--steps", "5"]
    run(data, [*common, *alone, "--output", "one"])
    ranks = ["--runtime", "ray", "--ranks", "2", "--steps", "3", "--set", "learner.zero_stage=2"]
    run(data, [*common, *ranks, "--output", "two"])
    stage = ["--set", "learner.zero_stage=0"]
    said = run(data, ["dpo", *alone, *stage, "--resume", "--output", "two"])
    assert "resuming from step-000003" in said
    assert len(metrics(data / "two")) == 5
    for one, two in zip(metrics(data / "one"), metrics(data / "two"), strict=True):
        for name in ("train/loss", "train/reward_margin", "train/grad_norm"):
            assert two[name] == pytest.approx(one[name], rel=1e-3, abs=1e-5)
