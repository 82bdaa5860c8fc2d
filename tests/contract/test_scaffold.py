"""`rlx plugins new`: what it writes installs, passes its own tests and trains, for every kind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from environment import Environment, train_arguments
from typer.testing import CliRunner

from rlx.cli.plugins import app
from rlx.cli.scaffold import write_package
from rlx.core.component import KINDS as ALL_KINDS
from rlx.core.component import kind_of
from rlx.core.errors import UsageError

KINDS = (
    "estimator",
    "loss",
    "correction",
    "reward",
    "agent",
    "sampler",
    "objective",
    "tracker",
)


def test_every_kind_has_a_template() -> None:
    assert {kind_of(kind) for kind in KINDS} == set(ALL_KINDS)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """A package of every kind, written, built and installed (about 10 s)."""
    folder = tmp_path_factory.mktemp("scaffold")
    environment = Environment(folder / "venv")
    packages = [write_package(kind, f"my-{kind}", folder / "packages") for kind in KINDS]
    environment.install(*packages)
    return environment


@pytest.mark.slow
def test_package_of_every_kind_passes_its_own_tests(environment: Environment) -> None:
    """One pytest that runs the kit on eight installed components, about 15 s."""
    packages = environment.bin.parents[1] / "packages"
    output = environment.run("pytest", "-q", "-p", "no:cacheprovider", ".", cwd=packages)
    assert "14 passed" in output, output
    assert (environment.site / "rlx_my_estimator" / "py.typed").is_file()


@pytest.mark.slow
@pytest.mark.engine
def test_package_of_every_kind_trains_a_step(environment: Environment, workspace: Path) -> None:
    words = (
        "--estimator my-estimator --loss my-loss --set correction=my-correction "
        "--reward my-reward --reward mypkg:digits --agent my-agent --sampler my-sampler "
        "--set trackers=[jsonl,console,my-tracker] --set rollout.context_length=64"
    )
    environment.rlx(*train_arguments("out", steps=1), *words.split(), cwd=workspace)
    manifest = json.loads((workspace / "out" / "manifest.json").read_text())
    used = {item["kind"]: item for item in manifest["components"] if "my-" in item["name"]}
    of_rollouts = [kind for kind in KINDS if kind != "objective"]
    assert set(used) == {kind_of(kind) for kind in of_rollouts}
    for kind in of_rollouts:
        assert used[kind_of(kind)]["distribution"] == f"rlx-my-{kind}"
        assert used[kind_of(kind)]["version"] == "0.1.0"
    (line,) = (workspace / "out" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["rollout/turns_mean"] == 3, "the agent asks for three tries"
    assert metrics["reward/my-reward/short"] == 1
    assert metrics["group/all_same_rate"] == 0, "the sampler drops such groups"
    assert (workspace / "out" / "my-tracker.txt").read_text().startswith("1 reward/mean=")


@pytest.mark.slow
@pytest.mark.engine
def test_package_of_an_objective_trains_a_step(environment: Environment, workspace: Path) -> None:
    arguments = "dpo --objective my-objective --steps 1 --runtime inline --output offline"
    environment.rlx(*arguments.split(), "--set", "objective.margin=0.5", cwd=workspace)
    manifest = json.loads((workspace / "offline" / "manifest.json").read_text())
    (used,) = [item for item in manifest["components"] if item["kind"] == "objectives"]
    assert (used["name"], used["distribution"]) == ("my-objective", "rlx-my-objective")
    (line,) = (workspace / "offline" / "metrics.jsonl").read_text().splitlines()
    assert {"train/loss", "train/gap", "eval/test/gap"} <= set(json.loads(line))


@pytest.mark.parametrize("kind", KINDS)
def test_written_files_are_tidy_python(tmp_path: Path, kind: str) -> None:
    folder = write_package(kind, "two_words", tmp_path)
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "README.md",
        "pyproject.toml",
        "rlx_two_words/__init__.py",
        "rlx_two_words/py.typed",
        "rlx_two_words/two_words.py",
        "tests/test_two_words.py",
    }
    for name in names:
        assert "{{" not in (folder / name).read_text()
    ruff = ["ruff", "check", "--isolated", "--select", "E,F,W,B,UP,RUF", "--line-length", "100"]
    for command in (ruff, ["ruff", "format", "--isolated", "--check", "--line-length", "100"]):
        done = subprocess.run(
            [sys.executable, "-m", *command, str(folder)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout


def test_mistakes_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for kind, name, words in (
        ("estimators", "group_norm", "built-in estimator"),
        ("loss", "Bad Name", "can't be the name"),
        ("loss", "class", "can't be the name"),
        ("los", "mine", "no component kind"),
    ):
        with pytest.raises(UsageError, match=words):
            write_package(kind, name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_package("loss", "mine", tmp_path)
    with pytest.raises(UsageError, match="exists"):
        write_package("loss", "mine", tmp_path)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("estimator", name) for name in ("component", "float", "list", "x", "estimator_inputs")),
        *(("reward", "len"), ("loss", "check_loss"), ("tracker", "mapping")),
    ],
)
def test_name_that_means_something_else_in_the_module_is_refused(
    tmp_path: Path, kind: str, name: str
) -> None:
    with pytest.raises(UsageError, match=f"'{name}' can't be the name") as caught:
        write_package(kind, name, tmp_path)
    assert f"my-{name}" in caught.value.fix
    assert list(tmp_path.iterdir()) == []
    write_package(kind, f"my_{name}", tmp_path)


def test_folder_that_can_not_be_written_is_said_plainly(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't be written: Not a directory"):
        write_package("loss", "mine", tmp_path / "file")


def test_next_step_can_be_pasted_where_folders_have_blanks(tmp_path: Path) -> None:
    folder = tmp_path / "my plugins"
    result = CliRunner().invoke(app, ["new", "loss", "mine", "-o", str(folder)])
    assert f"pip install -e '{folder}/rlx-mine'" in result.output


def test_command_says_what_to_do_next(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", "loss", "mine", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "rlx_mine/mine.py" in result.output
    assert "rlx plugins check rlx-mine && rlx train --loss mine --steps 3" in result.output
