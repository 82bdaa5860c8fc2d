"""The loops over the ladder, as docs/offline.md has them: each makes the tiny model better.

Each test is a sequence of `rlx` commands (about a minute on two idle cores).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from whole_runs import metrics, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HERE = "--runtime inline --engine transformers"
TASK = "--data embedded --reward exact_match --max-new-tokens 10"
EARLY = '''
def early(sample):
    """1 when the response begins with a letter of the first half of the alphabet, or before it."""
    return float(sample.response[:1] < "n")
'''


def rlx(folder: Path, line: str, *more: str) -> str:
    return run(folder, [*line.split(), *more], timeout=600)


def score(folder: Path, model: str, output: str, *more: str) -> float:
    """Mean reward of a model."""
    rlx(folder, f"eval {model} {HERE} --output {output}", *more)
    results = json.loads((folder / output / "results.json").read_text())
    (source,) = results["sources"].values()
    return float(source["mean"])


def skill(folder: Path, model: str, output: str) -> float:
    """Share of right answers to 150 held-out tasks of the embedded kind."""
    return score(folder, model, output, *"--max-tasks 150 --samples 2 --max-new-tokens 10".split())


def test_rejection_sampling(tmp_path: Path):
    before = skill(tmp_path, "embedded", "before")
    rlx(
        tmp_path,
        f"generate embedded {HERE} {TASK} --max-tasks 400 -n 8 "
        "--select best --min-reward 1 --output round-1",
    )
    rows = (tmp_path / "round-1/best.jsonl").read_text().splitlines()
    assert {json.loads(row)["reward"] for row in rows} == {1.0}
    rlx(
        tmp_path,
        "sft --model embedded --data round-1/best.jsonl --runtime inline "
        "--lr 3e-4 --epochs 4 --output round-1/sft",
    )
    assert skill(tmp_path, "round-1/sft/export", "after") > before + 0.15


def test_iterative_preferences(tmp_path: Path):
    scores = [skill(tmp_path, "embedded", "before")]
    model = "embedded"
    for number in (1, 2):
        rlx(
            tmp_path,
            f"generate {model} {HERE} {TASK} --max-tasks 300 -n 8 --seed {number} "
            f"--select pairs --min-margin 0.5 --output round-{number}",
        )
        rlx(
            tmp_path,
            f"dpo --model {model} --data round-{number}/pairs.jsonl --runtime inline "
            f"--lr 1e-4 --epochs 2 --output round-{number}/dpo",
        )
        trained = metrics(tmp_path / f"round-{number}/dpo")
        assert trained[-1]["train/reward_margin"] > trained[0]["train/reward_margin"]
        model = f"round-{number}/dpo/export"
        scores.append(skill(tmp_path, model, f"after-{number}"))
    assert scores[-1] > scores[0] + 0.15


def test_a_model_fine_tuned_under_rewards_gives_the_reward_that_is_asked_for(workspace: Path):
    (workspace / "letters.py").write_text(EARLY)
    task = f"--data data.jsonl --reward letters:early --max-new-tokens 3 {HERE}"
    rlx(
        workspace,
        f"generate tiny {task} -n 32 --select conditioned --set generate.truncated=keep "
        "--set generate.condition={prompt}{reward:.0f} --output made",
    )
    rlx(
        workspace,
        "sft --model tiny --data made/conditioned.jsonl --runtime inline "
        "--lr 3e-3 --epochs 2 --batch-size 64 --output made/sft",
    )
    low, high = (
        score(
            workspace,
            "made/sft/export",
            f"asked-for-{wanted}",
            *f"{task} --samples 8 --set data.template={{prompt}}{wanted}".split(),
        )
        for wanted in (0, 1)
    )
    assert high > low + 0.1


def test_distillation_from_data_and_on_policy(tmp_path: Path):
    rlx(
        tmp_path,
        f"generate embedded {HERE} {TASK} --max-tasks 300 -n 4 --select best --min-reward 1 "
        "--select all --output made",
    )
    rlx(
        tmp_path,
        "sft --model embedded --data made/best.jsonl --runtime inline --lr 3e-4 --epochs 4 "
        "--output teacher",
    )
    # off policy: full distributions on what the student itself wrote
    rlx(
        tmp_path,
        "distill --model embedded --teacher teacher/export --data made/samples.jsonl "
        "--set objective.divergence=js --runtime inline --lr 3e-4 --epochs 2 --output distilled",
    )
    trained = metrics(tmp_path / "distilled")
    assert trained[-1]["train/loss"] < 0.5 * trained[0]["train/loss"]
    # on policy: the reward of each token is what the teacher thinks of it
    rlx(
        tmp_path,
        "train --model embedded --data embedded --set rewards=[] --kl-coef 1 "
        "--set kl.reference=teacher/export --set kl.placement=reward --set kl.estimator=k1 "
        "--estimator reinforce --set estimator.gamma=0 --set estimator.whiten=false "
        "--loss reinforce --steps 20 --groups 32 --group-size 4 --max-new-tokens 10 --lr 2e-4 "
        f"--output on-policy {HERE}",
    )
    divergence = [record["policy/kl_ref"] for record in metrics(tmp_path / "on-policy")]
    assert sum(divergence[-3:]) < 0.5 * sum(divergence[:3])
    before = skill(tmp_path, "embedded", "before")
    assert skill(tmp_path, "distilled/export", "after") > before + 0.1
    assert skill(tmp_path, "on-policy/export", "after-on-policy") > before + 0.1
