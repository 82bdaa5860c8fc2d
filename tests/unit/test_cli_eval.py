"""`rlx eval`: what a name stands for, which settings hold, and what the table shows."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from model_folder import LLAMA, make_model
from rich.console import Console
from tiny_tokenizer import tiny_tokenizer

from rlx.cli.eval import FLAGS, results_table
from rlx.cli.main import main
from rlx.cli.targets import find_target, numbered_folder
from rlx.core.config import RunConfig
from rlx.core.evaluation import Evaluation, Scoring, SourceResult
from rlx.core.settings import known_keys

Outcome = tuple[int, str, str]
ROW = '{"prompt": "1+1=", "label": "2"}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model, data, and a run with two checkpoints of which 2 is best."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in __import__("os").environ if name.startswith("RLX_")]:
        monkeypatch.delenv(name)
    make_model(tmp_path / "model", {**LLAMA, "max_position_embeddings": 64})
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text(ROW)
    run = tmp_path / "runs" / "x"
    for step in (2, 4):
        make_model(run / f"checkpoints/step-{step:06d}/model")
        (run / f"checkpoints/step-{step:06d}/files.json").write_text("{}")
    (run / "checkpoints/best").symlink_to("step-000002")
    (run / "config.yaml").write_text("model: model\nseed: 5\n")
    return tmp_path


@pytest.fixture
def rlx(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    # with torch imported `main` ends the process at once
    monkeypatch.setattr("rlx.cli.main._NATIVE", frozenset())

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rlx", *arguments])
        with pytest.raises(SystemExit) as caught:
            main()
        output = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0), output.out, output.err

    return run


@pytest.mark.parametrize(
    ("source", "step", "model"),
    [
        ("runs/x", 4, "step-000004/model"),
        ("x", 4, "step-000004/model"),
        ("runs/x/checkpoints/step-000002", 2, "step-000002/model"),
        ("runs/x/checkpoints/best", 2, "step-000002/model"),
    ],
)
def test_a_run_is_its_newest_checkpoint(folder: Path, source: str, step: int, model: str) -> None:
    target = find_target(source, Path("runs"))
    assert target.step == step
    assert target.model is not None
    assert target.model.endswith(model)
    assert target.settings is not None
    assert target.settings.read_text().startswith("model: model")


def test_other_names_are_models(folder: Path) -> None:
    for name in ("model", "org/name", "embedded"):
        target = find_target(name, Path("runs"))
        assert (target.model, target.settings, target.step) == (name, None, 0)
    assert find_target(None, Path("runs")).model is None


def test_results_lie_with_the_run_or_under_evals(folder: Path) -> None:
    run = find_target("runs/x", Path("runs"))
    assert numbered_folder(run, RunConfig(), "evals") == Path("runs/x/evals/step-000004-1")
    model = find_target("org/a model", Path("runs"))
    config = RunConfig(model="org/a model")
    assert numbered_folder(model, config, "evals") == Path("evals/a-model-1")
    Path("evals/a-model-1").mkdir(parents=True)
    assert numbered_folder(model, config, "evals") == Path("evals/a-model-2")


def test_flags_set_known_keys() -> None:
    assert set(FLAGS.values()) <= set(known_keys())


BAD = [
    (["runs/y"], "there is no model, run or checkpoint runs/y"),
    (["runs/x/checkpoints/step-000003"], "did you mean 'step-00000"),
    (["./modle"], "did you mean 'model'?"),
    (["model", "--data", "dat.jsonl", "--max-new-tokens", "8"], "did you mean 'data.jsonl'?"),
    (["model", "--data", "data.jsonl", "--reward", "mth"], "did you mean 'math'?"),
    (["model", "--data", "data.jsonl", "--samples", "0"], "eval.samples"),
    (["model", "--data", "data.jsonl", "-n", "4", "--temperature", "0"], "all be the same"),
    (["model", "--data", "data.jsonl", "--max-new-tokens", "64"], "leave no room"),
    (["model", "--data", "data.jsonl", "--output", "runs"], "is not empty"),
    (["model", "--data", "data.jsonl", "--set", "eval.smaples=3"], "did you mean 'eval.samples'?"),
]


@pytest.mark.parametrize(("arguments", "expected"), BAD)
def test_each_mistake_is_one_message(
    rlx: Callable[..., Outcome], arguments: list[str], expected: str
) -> None:
    code, _, err = rlx("eval", *arguments)
    assert (code, expected in err, "Traceback" in err) == (2, True, False), err


def test_a_run_without_a_checkpoint_says_so(rlx: Callable[..., Outcome], folder: Path) -> None:
    (folder / "runs/y").mkdir()
    (folder / "runs/y/config.yaml").write_text("seed: 1\n")
    code, _, err = rlx("eval", "runs/y")
    assert code == 2
    assert "runs/y has no checkpoint" in err


def result(**more: float) -> SourceResult:
    values = {
        "tasks": 3,
        "failed": 0,
        "rollouts": 6,
        "mean": 0.5,
        "mean_stderr": 0.1,
        "length_mean": 7.25,
        "truncated_rate": 0.125,
        **more,
    }
    return SourceResult(**values, pass_at={1: 0.25, 2: 0.5}, parts={})  # type: ignore[arg-type]


def table(**sources: SourceResult) -> str:
    found = Evaluation(sources=sources, groups={}, scoring=Scoring(), failed_rewards=0, seconds=1.0)
    out = Console(file=io.StringIO(), width=120)
    out.print(results_table(found))
    return out.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_has_a_row_for_each_source() -> None:
    text = table(maths=result(), code=result(mean=float("nan"), mean_stderr=float("nan")))
    head, maths, code = text.splitlines()
    assert head.split() == ["source", "tasks", "mean", "pass@1", "pass@2", "tokens", "truncated"]
    assert maths.split() == ["maths", "3", "0.500", "±", "0.100", "0.250", "0.500", "7.2", "12.5%"]
    assert code.split()[:4] == ["code", "3", "–", "0.250"]


def test_failed_tasks_have_a_column_when_there_are_any() -> None:
    assert "failed" not in table(a=result())
    assert table(a=result(failed=2)).splitlines()[1].split()[-1] == "2"
