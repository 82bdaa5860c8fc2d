"""`rlx train`: every mistake is one message with exit code 2, before anything is started."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from model_folder import LLAMA, make_model

from rlx.cli.main import _exit_code
from rlx.core.config import RunConfig
from rlx.core.errors import ComponentError, EngineError
from rlx.core.settings import load_settings

Outcome = tuple[int, str, str]
SMALL = {**LLAMA, "hidden_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 512}


class Engine:
    """Stands in for the engine; remembers what it was asked to do."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls: list[dict[str, Any]] = []
        self.prepared: list[RunConfig] = []
        self.answer: Any = None
        self.error: BaseException | None = None

    def train(self, config: RunConfig, **more: Any) -> Any:
        self.calls.append({"config": config, **more})
        if self.error is not None:
            raise self.error
        return self.answer or SimpleNamespace(
            folder=self.folder, steps=config.steps, metrics={}, reason="", signal=None
        )

    def prepare(self, config: RunConfig, **more: Any) -> Any:
        self.prepared.append(config)
        source = SimpleNamespace(name="data", tasks=[1, 2], skipped_too_long=3, probability=0.5)
        return SimpleNamespace(tasks=SimpleNamespace(sources=[source]), evaluation=None)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A working folder with a model, in which the engine is replaced."""
    make_model(tmp_path / "model", SMALL)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in __import__("os").environ if name.startswith("RLX_")]:
        monkeypatch.delenv(name)
    engine = Engine(tmp_path / "runs" / "x")
    for name in ("train", "prepare"):
        module = SimpleNamespace(**{name: getattr(engine, name)})
        monkeypatch.setitem(sys.modules, f"rlx.core.engine.{name}", module)
    return engine


@pytest.fixture
def rlx(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Outcome]:
    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["rlx", *arguments])
        code = _exit_code()
        output = capsys.readouterr()
        return code, output.out, output.err

    return run


MODEL = ("--model", "model")
BAD = [
    (["--model", "/no/such"], "no model folder"),
    (["--model", "./modle"], "did you mean 'model'?"),
    ([*MODEL, "--estimator", "grup_norm"], "did you mean 'group_norm'?"),
    ([*MODEL, "--estimator", "nope:attr"], "there is no module 'nope'"),
    ([*MODEL, "--estimator", "broken:attr"], "ZeroDivisionError"),
    ([*MODEL, "--loss", "pppo"], "did you mean"),
    ([*MODEL, "--reward", "mth"], "did you mean 'math'?"),
    ([*MODEL, "--set", "estimator.epz=1"], "did you mean 'eps'?"),
    ([*MODEL, "--set", "estimator.eps=abc"], "eps"),
    ([*MODEL, "--set", "lr=1"], "did you mean 'learner.lr'?"),
    ([*MODEL, "--set", "rollout.engine"], "key=value"),
    ([*MODEL, "--engine", "vlm"], "did you mean 'vllm'?"),
    ([*MODEL, "--runtime", "rya"], "one of ray, inline"),
    ([*MODEL, "--aggregation", "mean"], "token-mean"),
    ([*MODEL, "--group-size", "1", "--estimator", "rloo"], "--group-size"),
    ([*MODEL, "--group-size", "0"], "≥ 1"),
    ([*MODEL, "--lr", "0"], "learner.lr"),
    ([*MODEL, "--temperature", "0"], "rollout.temperature"),
    ([*MODEL, "--max-new-tokens", "512"], "leave no room for a prompt"),
    ([*MODEL, "--set", "learner.minibatch_size=7"], "does not divide"),
    ([*MODEL, "--resume"], "--resume needs to know which run"),
    ([*MODEL, "--resume", "--output", "runs/none"], "no run"),
    ([*MODEL, "--output", "model"], "not empty"),
    ([*MODEL, "--set", "plugins.required=[rlx-none]"], "rlx-none"),
    (["-c", "none.yaml"], "none.yaml"),
    (["-c", "bad.yaml"], "bad.yaml:2"),
    (["-c", "typo.yaml"], "typo.yaml:1"),
    (["--steps", "many"], "--steps"),
    (["--nope"], "No such option"),
    (["extra"], "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda item: str(item)[:60])
def test_a_mistake_is_one_clear_message(
    rlx: Callable[..., Outcome], engine: Engine, arguments: list[str], message: str
) -> None:
    Path("broken.py").write_text("1 / 0\n")
    Path("bad.yaml").write_text("steps: 1\n  x: [\n")
    Path("typo.yaml").write_text("stepz: 1\n")
    code, out, err = rlx("train", *arguments)
    assert code == 2
    assert message in " ".join(err.replace("│", " ").split())
    assert out == ""
    assert "site-packages/typer" not in err
    assert engine.calls == []
    assert not Path("runs").exists()


def test_a_variable_is_a_layer_and_its_mistake_is_named(
    rlx: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_ROLLOUT__GROUPS", "x")
    code, _, err = rlx("train", *MODEL)
    assert code == 2
    assert "where  RLX_ROLLOUT__GROUPS" in err


def test_the_engine_gets_the_merged_settings(
    rlx: Callable[..., Outcome], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_SEED", "5")
    Path("run.yaml").write_text("steps: 7\nrollout: {groups: 4}\n")
    code, out, _ = rlx(
        "train", *MODEL, "-c", "run.yaml", "--group-size", "4", "--reward", "math",
        "--reward", "repetition:0.5", "--set", "estimator.eps=1e-5", "--lr", "1e-5",
    )  # fmt: skip
    assert code == 0
    (call,) = engine.calls
    config = call["config"]
    assert (config.steps, config.seed, config.batch_size) == (7, 5, 16)
    assert [(item.name, item.weight) for item in config.rewards] == [
        ("math", 1),
        ("repetition", 0.5),
    ]
    assert config.estimator.params == {"eps": 1e-5}
    assert call["origins"]["steps"] == "run.yaml:1"
    assert call["resume"] is False
    assert "7 of 7 steps" in out


def test_components_in_the_working_folder_can_be_named(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    code = "def score(sample): return 1.0\n"
    Path("mine_cli.py").write_text(code)
    assert rlx("train", *MODEL, "--reward", "mine_cli:score:0.5")[0] == 0
    assert rlx("train", *MODEL, "--reward", "mine_cli.py:score")[0] == 0
    assert engine.calls[0]["config"].rewards[0].weight == 0.5


def test_a_dry_run_prints_a_configuration_that_can_be_run(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    code, out, err = rlx("train", *MODEL, "--lr", "3e-5", "--dry-run")
    assert code == 0
    line = "2 tasks of data, 50.0% of the draws, 3 skipped because their prompts are too long"
    assert err.startswith(f"training: {line}\nnext: ")
    assert (len(engine.prepared), engine.calls) == (1, [])
    assert not Path("runs").exists()
    Path("again.yaml").write_text(out)
    config = load_settings(files=[Path("again.yaml")], env={}).config
    assert config.learner.lr == 3e-5
    assert any(line.endswith("# --lr") for line in out.splitlines())
    assert rlx("train", "-c", "again.yaml")[0] == 0
    assert engine.calls[0]["config"] == config


def test_a_dry_run_checks_as_the_run_does(rlx: Callable[..., Outcome]) -> None:
    assert rlx("train", *MODEL, "--dry-run", "--set", "learner.minibatch_size=7")[0] == 2


def test_warnings_are_printed_and_the_run_goes_on(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    code, _, err = rlx("train", *MODEL, "--set", "rollout.top_p=0.9")
    assert code == 0
    assert "warning: top_p" in err
    assert len(engine.calls) == 1


def make_run(folder: Path, step: int | None) -> None:
    (folder / "checkpoints" / "step-000003").mkdir(parents=True)
    (folder / "checkpoints" / "step-000003" / "files.json").write_text("{}")
    (folder / "manifest.json").write_text("{}")
    (folder / "config.yaml").write_text(f"model: model\noutput: {folder}\nsteps: 9\nseed: 4\n")
    if step:
        (folder / "finished.json").write_text(f'{{"step": {step}}}')


def test_resume_takes_the_configuration_of_the_run(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    make_run(Path("runs/a"), None)
    assert rlx("train", "--resume", "--output", "runs/a", "--steps", "20")[0] == 0
    (call,) = engine.calls
    assert (call["config"].seed, call["config"].steps, call["resume"]) == (4, 20, True)
    assert call["config"].output == Path("runs/a")


def test_a_run_s_configuration_runs_again_beside_it(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    make_run(Path("runs/a"), 9)
    assert rlx("train", "-c", "runs/a/config.yaml")[0] == 0
    assert engine.calls[0]["config"].seed == 4
    assert engine.calls[0]["config"].output != Path("runs/a")
    assert rlx("train", "-c", "runs/a/config.yaml", "--output", "runs/a")[0] == 2
    assert rlx("train", "-c", "runs/a/config.yaml", "--resume", "--steps", "10")[0] == 0
    assert engine.calls[1]["config"].output == Path("runs/a")


def test_an_ended_run_says_where_its_files_are_and_what_is_next(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    make_run(engine.folder, None)
    (engine.folder / "export").mkdir()
    engine.answer = SimpleNamespace(
        folder=engine.folder, steps=3, metrics={"reward/mean": 0.5}, reason="", signal=None
    )
    code, out, _ = rlx("train", *MODEL, "--steps", "3")
    assert code == 0
    assert "reward 0.500" in out
    assert "files in runs/x/" in out
    assert "checkpoints/" in out
    assert "export/" not in out
    assert "next: rlx runs show runs/x" in out


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_an_interrupted_run_exits_as_its_signal_says(
    rlx: Callable[..., Outcome], engine: Engine, signal: int, code: int
) -> None:
    engine.answer = SimpleNamespace(
        folder=engine.folder, steps=2, metrics={}, reason="stopped", signal=signal
    )
    found, out, err = rlx("train", *MODEL)
    assert found == code
    assert "next: rlx train --resume --output runs/x" in out
    assert "Traceback" not in err


def test_ctrl_c_before_the_run_exits_with_130(rlx: Callable[..., Outcome], engine: Engine) -> None:
    engine.error = KeyboardInterrupt()
    code, _, err = rlx("train", *MODEL)
    assert code == 130
    assert "Traceback" not in err


def user_code() -> None:
    raise ValueError("in the reward")


def test_a_failing_component_shows_the_user_s_frames(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    try:
        user_code()
    except ValueError as cause:
        engine.error = ComponentError("reward 'mine' failed 3 times")
        engine.error.__cause__ = cause
    code, _, err = rlx("train", *MODEL)
    assert code == 1
    assert "in user_code" in err
    assert err.rstrip().endswith("error: reward 'mine' failed 3 times")


def test_an_engine_failure_without_cause_is_one_message(
    rlx: Callable[..., Outcome], engine: Engine
) -> None:
    engine.error = EngineError("the engine did not start; see logs/engine.log")
    code, _, err = rlx("train", *MODEL)
    assert code == 1
    assert err == "error: the engine did not start; see logs/engine.log\n"


def test_a_bug_shows_its_whole_traceback(rlx: Callable[..., Outcome], engine: Engine) -> None:
    engine.error = RuntimeError("what")
    code, _, err = rlx("train", *MODEL)
    assert code == 1
    assert "Traceback (most recent call last)" in err
    assert "error: RuntimeError: what" in err
