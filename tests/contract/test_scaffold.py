"""`rlx plugins new`: what it writes installs, is found, passes its own tests and the kit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlx.cli.plugins import app
from rlx.cli.scaffold import write_package
from rlx.core.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
KINDS = ("estimator", "loss", "correction", "reward", "agent", "sampler", "tracker")


def python(*arguments: str, cwd: Path, path: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_package_of_every_kind_passes_its_own_tests(tmp_path: Path) -> None:
    """Starts one pytest that runs the kit on seven components, about 15 s."""
    folders = [write_package(kind, f"my-{kind}", tmp_path) for kind in KINDS]
    path = ":".join(map(str, [ROOT, *folders]))
    output = python(
        *("-m", "pytest", "-q", "-p", "rlx.testing.pytest_plugin", "-p", "no:cacheprovider"),
        cwd=tmp_path,
        path=path,
        PYTEST_DISABLE_PLUGIN_AUTOLOAD="1",
    )
    assert "11 passed" in output, output


@pytest.mark.slow
def test_package_installs_with_pip_and_is_found_by_name(tmp_path: Path) -> None:
    """Builds and installs a wheel, about 10 s."""
    folder = write_package("estimator", "my_zscore", tmp_path)
    site = tmp_path / "site"
    output = python(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--target", str(site), str(folder)),
        cwd=tmp_path,
        path=str(ROOT),
    )
    assert (site / "rlx_my_zscore" / "py.typed").is_file(), output
    code = (
        "import rlx; from rlx.testing import estimator_inputs;"
        "f = rlx.resolve('estimators', 'my_zscore', eps=0.0);"
        "print(f.ref.distribution, f(estimator_inputs(rewards=[0.0, 1.0])).tolist())"
    )
    output = python("-c", code, cwd=site.parent, path=f"{ROOT}:{site}")
    assert output.startswith("rlx-my-zscore [-0.7071"), output


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
        ("objective", "mine", "no template"),
        ("los", "mine", "no component kind"),
    ):
        with pytest.raises(UsageError, match=words):
            write_package(kind, name, tmp_path)
    assert list(tmp_path.iterdir()) == []
    write_package("loss", "mine", tmp_path)
    with pytest.raises(UsageError, match="exists"):
        write_package("loss", "mine", tmp_path)


def test_command_says_what_to_do_next(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["new", "loss", "mine", "-o", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "rlx_mine/mine.py" in result.output
    assert "rlx plugins check rlx-mine" in result.output
