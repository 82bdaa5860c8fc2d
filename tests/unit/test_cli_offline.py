"""`rlx sft` and its relatives before anything is started: options, presets, dry runs, mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_folder import LLAMA, make_model
from tiny_tokenizer import tiny_tokenizer
from typer.testing import CliRunner

from rlx.cli.main import COMMANDS, app
from rlx.cli.offline_options import FLAGS
from rlx.core.errors import UsageError
from rlx.core.settings import known_keys
from rlx.core.yaml_text import parse_file

NAMES = ("sft", "rm", "prm", "dpo", "kto")
PAIRS = [{"prompt": f"p{i}:", "chosen": f"yes{i}", "rejected": "no"} for i in range(10)]


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in list(__import__("os").environ):
        if name.startswith("RLX_"):
            monkeypatch.delenv(name)
    return tmp_path


def dry_run(*words: str) -> tuple[dict[str, Any], str]:
    """The settings that a command would run with, and what it says of the data."""
    result = CliRunner().invoke(app, [*words, "--dry-run"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return dict(parse_file(result.stdout, "dry-run")[0]), result.stderr


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_flags_set_known_keys() -> None:
    assert set(FLAGS.values()) <= set(known_keys())


@pytest.mark.parametrize("name", NAMES)
def test_command_without_arguments_finds_embedded_data(name: str) -> None:
    settings, said = dry_run(name)
    assert settings["objective"]["name"] == name
    (held_out,) = settings["eval"]["sources"]
    assert (held_out["path"], held_out["split"]) == ("embedded", "test")
    assert "training: 2,048 of 2,048 rows of embedded" in said
    assert "64 optimizer steps" in said
    assert name in COMMANDS


def test_preset_is_below_every_other_layer(workspace: Path) -> None:
    (workspace / "mine.yaml").write_text("objective: {name: ipo, beta: 0.5}\nlearner: {lr: 1.0e-3}")
    settings, _ = dry_run("dpo", "-c", "mine.yaml")
    assert settings["objective"] == {"name": "ipo", "params": {"beta": 0.5}}
    assert settings["learner"]["lr"] == 1e-3
    settings, _ = dry_run("dpo", "--objective", "simpo", "--set", "objective.gamma=0.3")
    assert settings["objective"] == {"name": "simpo", "params": {"gamma": 0.3}}


def test_dry_run_counts_what_is_left_out(workspace: Path) -> None:
    data = write(workspace / "pairs.jsonl", [*PAIRS, {**PAIRS[0], "chosen": "no"}])
    _, said = dry_run("dpo", "--data", data, "--batch-size", "4", "--epochs", "2")
    assert "training: 10 of 11 rows of pairs" in said
    assert "1 of 11 rows left out: pairs whose answers are the same" in said
    assert "5 optimizer steps" in said
    assert not (workspace / "runs").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "--objective", "sfd"], "sfd"),
        (["dpo", "--set", "objective.betta=1"], "betta"),
        (["dpo", "--max-length", "100000"], "more than the model's context"),
        (["sft", "--batch-size", "1", "--ranks", "2"], "leave some of 2 ranks idle"),
        (["sft", "--runtime", "inline", "--ranks", "2"], "processes of their own"),
        (["sft", "--set", "learner.epochs=2"], "learner.epochs is of rollouts"),
        (["rm", "--data", "pairs.jsonl", "--eval-every", "5"], "no data to evaluate on"),
        (["sft", "--data", "pairs.jsonl"], "no column 'completion'"),
        (["rm", "--best", "eval/tast/loss"], "no metric of the held-out data"),
        (["sft", "--resume", "--output", "nothing"], "there is no run in nothing"),
        (["distill"], "needs a teacher, and none is named"),
        (["rm", "--set", "data.max_prompt_tokens=9"], "no prompt is measured"),
        (["dpo", "--reference", "./nowhere"], "there is no model folder ./nowhere"),
    ],
)
def test_mistakes_end_before_anything_starts(
    workspace: Path, words: list[str], message: str
) -> None:
    write(workspace / "pairs.jsonl", PAIRS)
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, UsageError), result.output
    assert message in str(result.exception)
    assert not (workspace / "runs").exists()


def test_sources_are_mixed_in_the_shares_that_they_are_given(workspace: Path) -> None:
    for name in ("a", "b"):
        write(workspace / f"{name}.jsonl", PAIRS)
    sources = "[{path: a.jsonl, probability: 0.8}, {path: b.jsonl, probability: 0.2}]"
    _, said = dry_run("rm", "--set", f"data.sources={sources}", "--batch-size", "4")
    assert "training: 10 of 10 rows of a" in said
    assert "80.0% of the draws" in said
    assert "5 optimizer steps" in said
    result = CliRunner().invoke(app, ["rm", "--set", f"data.sources={sources[:-1]}, c.jsonl]"])
    assert "c.jsonl" in str(result.exception)


def test_model_without_a_tokenizer_is_refused_by_the_setting_that_names_it(
    workspace: Path,
) -> None:
    make_model(workspace / "bare", LLAMA)
    for words, where in (
        (["sft", "--model", "bare"], "model"),
        (["dpo", "--reference", "bare"], "kl.reference"),
        (["distill", "--teacher", "bare"], "offline.teacher"),
    ):
        result = CliRunner().invoke(app, [*words, "--dry-run"])
        assert isinstance(result.exception, UsageError), result.output
        assert "can't be loaded" in result.exception.what
        assert result.exception.where == where


def test_warm_up_as_long_as_the_run_is_warned_of(workspace: Path) -> None:
    _, said = dry_run("sft", "--steps", "4", "--set", "learner.warmup_steps=4")
    assert "the warm-up of 4 optimizer steps is as long as the run (4)" in said


def test_reference_that_nobody_reads_is_warned_of(workspace: Path) -> None:
    _, said = dry_run("sft", "--reference", "embedded")
    assert "reads no reference model" in said


def test_teacher_and_reference_need_the_vocabulary_of_the_model(workspace: Path) -> None:
    make_model(workspace / "other", LLAMA)
    tiny_tokenizer().save_pretrained(workspace / "other")
    result = CliRunner().invoke(app, ["distill", "--teacher", "other"])
    assert isinstance(result.exception, UsageError), result.output
    assert "the teacher other has another vocabulary than embedded" in str(result.exception)
    result = CliRunner().invoke(app, ["dpo", "--reference", "other", "--dry-run"])
    assert isinstance(result.exception, UsageError), result.output
    assert "the reference other has another vocabulary than embedded" in str(result.exception)
    settings, _ = dry_run("distill", "--teacher", "embedded", "--set", "objective.divergence=js")
    assert settings["offline"]["teacher"] == "embedded"
    _, said = dry_run("sft", "--set", "offline.teacher=embedded")
    assert "reads no teacher" in said
