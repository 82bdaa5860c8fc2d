"""Help, version and completion: quick, and without importing plugins or heavy libraries."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlx.cli import main
from rlx.core.errors import RunInterrupted

HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "tensorboard")
COMMANDS = ("train", "plan", "doctor", "plugins", "runs", "export")
LIMIT = 2.0
"""Seconds for the best of three; the aim on an idle machine is 0.3."""


def python(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "TERM": "dumb", "COLUMNS": "100", **(env or {})}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=variables,
        cwd=cwd,
        timeout=120,
        check=False,
    )


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Top-level modules that `-X importtime` lists."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines}


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["train", "--help"],
        ["plan", "-h"],
        ["sft", "-h"],
        ["doctor", "-h"],
        ["export", "-h"],
        ["runs", "-h"],
        ["plugins", "-h"],
        ["plugins", "list"],
    ],
    ids=" ".join,
)
def test_help_and_listings_import_nothing_heavy(arguments: list[str]) -> None:
    done = python("-X", "importtime", "-m", "rlx", *arguments)
    assert done.returncode == 0
    assert imported(done)
    assert not imported(done) & set(HEAVY)


def test_help_is_quick_and_lists_every_command() -> None:
    best = LIMIT
    for _ in range(3):
        begin = time.monotonic()
        done = python("-m", "rlx", "--help")
        best = min(best, time.monotonic() - begin)
    assert best < LIMIT
    assert all(f" {command} " in done.stdout for command in COMMANDS)


def complete(words: str) -> subprocess.CompletedProcess[str]:
    env = {
        "_RLX_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return python("-X", "importtime", "-m", "rlx", env=env)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("rlx tr", {"train"}),
        ("rlx train --group", {"--groups", "--group-size"}),
        ("rlx train --estimator group", {"group_norm"}),
        ("rlx train --loss gs", {"gspo"}),
        ("rlx train --engine v", {"vllm"}),
        ("rlx train --set learner.weight", {"learner.weight_decay="}),
        ("rlx plan --reward exact", {"exact_match"}),
    ],
)
def test_completion_offers_commands_flags_and_components(words: str, expected: set[str]) -> None:
    done = complete(words)
    assert expected <= set(done.stdout.split())
    assert not imported(done) & set(HEAVY)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_can_be_installed(shell: str) -> None:
    done = python("-m", "rlx", env={"_RLX_COMPLETE": f"source_{shell}"})
    assert done.returncode == 0
    assert "_RLX_COMPLETE" in done.stdout


def make_plugin(folder: Path, dist: str, *, command: str, module: str, code: str) -> None:
    info = folder / f"{dist}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[rlx.commands]\n{command} = {module}:app\n")
    (folder / f"{module}.py").write_text(code)


APP = """
import typer
app = typer.Typer()

@app.command()
def hello(name: str = "you"):
    '''Say hello.'''
    print("hello", name)
"""


def test_commands_of_plugins_are_listed_unimported_and_run_when_called(tmp_path: Path) -> None:
    make_plugin(tmp_path, "rlx_hello", command="hello", module="mod_hello", code=APP)
    code = "raise RuntimeError('imported')"
    make_plugin(tmp_path, "rlx_bad", command="bad", module="mod_bad", code=code)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    listing = python("-m", "rlx", "--help", env=env)
    assert listing.returncode == 0
    assert "From the plugin rlx_hello" in listing.stdout.replace("-", "_")
    assert python("-m", "rlx", "hello", "--name", "x", env=env).stdout == "hello x\n"
    bad = python("-m", "rlx", "bad", env=env)
    assert bad.returncode == 2
    assert "rlx_bad" in bad.stderr.replace("-", "_")
    assert "RuntimeError('imported')" in bad.stderr
    off = python("-m", "rlx", "hello", env={**env, "RLX_PLUGINS": ""})
    assert off.returncode == 2
    assert "there is no command 'hello'" in off.stderr


def test_a_command_of_two_plugins_is_an_error_only_when_called(tmp_path: Path) -> None:
    make_plugin(tmp_path, "rlx_one", command="hello", module="mod_one", code=APP)
    make_plugin(tmp_path, "rlx_two", command="hello", module="mod_two", code=APP)
    make_plugin(tmp_path, "rlx_train", command="train", module="mod_train", code=APP)
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path.cwd())])}
    assert python("-m", "rlx", "--help", env=env).returncode == 0
    done = python("-m", "rlx", "hello", env=env)
    assert done.returncode == 2
    assert "is offered by" in done.stderr
    assert "--group-size" in python("-m", "rlx", "train", "--help", env=env).stdout


def test_an_unknown_command_gets_a_suggestion() -> None:
    done = python("-m", "rlx", "trian")
    assert done.returncode == 2
    assert "did you mean 'train'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_interrupted_command_exits_as_one_that_its_signal_ended(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(**_: object) -> None:
        raise RunInterrupted("stopped by SIGTERM", signal=15)

    monkeypatch.setattr(main, "app", interrupted)
    assert main._exit_code() == 143
    assert capsys.readouterr().err == "note: stopped by SIGTERM\n"
