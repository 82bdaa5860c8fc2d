"""Really installed plugins that misbehave: each is named, none stops or changes another's run."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from environment import Environment, train_arguments
from hostile import SLOW_SECONDS, damage, wheels
from whole_runs import metrics, weights

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """All of them at once, installed by one pip (about 3 s)."""
    folder = tmp_path_factory.mktemp("hostile")
    environment = Environment(folder / "venv")
    environment.install(*wheels(folder / "wheels"))
    damage(environment.site)
    return environment


@pytest.fixture(scope="module")
def runs(
    environment: Environment, template: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """A run without plugins (`calm`), one with all (`wild`), and what the second one printed."""
    import shutil

    folder = tmp_path_factory.mktemp("runs") / "workspace"
    shutil.copytree(template, folder)
    words = ["--reward", "mypkg:digits"]
    environment.rlx(*train_arguments("calm", steps=3), *words, cwd=folder, RLX_PLUGINS="")
    text = environment.rlx(*train_arguments("wild", steps=3), *words, cwd=folder)
    return folder, text


def test_help_and_listing_are_unaffected(environment: Environment, tmp_path: Path) -> None:
    started = time.monotonic()
    shown = environment.rlx("--help", cwd=tmp_path)
    listed = environment.rlx("plugins", "list", "--json", cwd=tmp_path)
    assert time.monotonic() - started < SLOW_SECONDS, "nothing was imported"
    assert "train" in shown
    assert "rlx-raises" in shown  # its command
    assert "Traceback" not in shown
    rows = json.loads("{" + listed.partition("\n{")[2])  # warnings come first
    names = {(row["kind"], row["name"]) for row in rows["components"]}
    assert {("losses", "rlx-twin-a/same"), ("losses", "rlx-twin-b/same")} <= names
    assert {("losses", "slow"), ("estimators", "rlx-taker/group_norm")} <= names
    assert ("losses", "ppo") in names
    assert len(rows["hooks"]) == 6


def test_run_that_uses_none_of_them_is_the_same_to_the_last_bit(runs: tuple[Path, str]) -> None:
    folder, _ = runs
    assert metrics(folder / "wild") == metrics(folder / "calm")
    assert weights(folder / "wild") == weights(folder / "calm")


def test_hook_module_that_fails_to_import_is_named_with_the_way_to_switch_it_off(
    runs: tuple[Path, str],
) -> None:
    folder, text = runs
    for name, error in (
        ("raises", "RuntimeError: hooks was imported"),
        ("quits", "SystemExit: 0"),
    ):
        warning = " ".join(line for line in text.splitlines() if f"rlx-{name} 0.3" in line)
        for part in (f"'{name}' ({name}_hooks)", error, f"--no-plugin rlx-{name}"):
            assert part in warning, text
    manifest = json.loads((folder / "wild" / "manifest.json").read_text())
    broken = {item["distribution"] for item in manifest["plugins"]["broken"]}
    assert broken == {"rlx-raises", "rlx-quits"}


def test_misspelt_hook_is_reported_with_the_nearest_name(runs: tuple[Path, str]) -> None:
    _, text = runs
    assert "there is no hook 'rlx_on_step_ends'; did you mean 'rlx_on_step_end'?" in text
    assert "a parameter with a default is never filled (path)" in text


def test_hook_that_raises_in_mid_run_is_logged_once_and_the_run_goes_on(
    runs: tuple[Path, str],
) -> None:
    folder, text = runs
    assert text.count("rlx_on_step_end of plugin rlx-midrun:midrun raised") == 1
    assert text.count("ValueError: the second step was too much") == 1
    assert (folder / "wild" / "midrun.txt").read_text().split() == ["1", "2"]
    assert "3 of 3 steps" in text


def test_hooks_that_write_to_what_they_see_change_nothing(runs: tuple[Path, str]) -> None:
    folder, text = runs
    assert text.count("read-only") >= 2
    assert all(step["reward/std"] > 0 for step in metrics(folder / "wild"))
    assert "rlx_configure of plugin rlx-vandal:vandal changed the configuration" in text
    assert text.count("rlx_on_checkpoint of plugin rlx-vandal:vandal raised") == 1


def test_damaged_installation_is_told_and_passed_over(runs: tuple[Path, str]) -> None:
    _, text = runs
    assert "warning: rlx-damaged 1: the entry point 'x = 1 + 1'" in text
    assert "warning: rlx-damaged 1: there is no entry-point group 'rlx.loss'; did you mean" in text


def test_strict_mode_stops_at_the_first_broken_plugin(
    environment: Environment, workspace: Path
) -> None:
    words = [*train_arguments("out"), "--reward", "mypkg:digits", "--dry-run"]
    text = environment.rlx(*words, cwd=workspace, code=2, RLX_STRICT_PLUGINS="1")
    assert "failed to load" in text
    off = ["--no-plugin", "rlx-raises", "--no-plugin", "rlx-quits"]
    environment.rlx(*words, *off, cwd=workspace, RLX_STRICT_PLUGINS="1")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--loss same", ["offered by rlx-twin-a 0.3 and rlx-twin-b 0.3", "rlx-twin-b/same"]),
        ("--loss raises", ["(rlx-raises 0.3)", "loss was imported", "raises_loss.py"]),
        ("--loss quits", ["(rlx-quits 0.3)", "SystemExit(0)"]),
        ("--loss rlx-taker/pppo", ["there is no loss 'rlx-taker/pppo'", "did you mean 'ppo'"]),
    ],
)
def test_selecting_a_bad_component_stops_before_anything_is_started(
    environment: Environment, tmp_path: Path, words: str, parts: list[str]
) -> None:
    started = time.monotonic()
    text = environment.rlx("train", *words.split(), cwd=tmp_path, code=2)
    for part in parts:
        assert part in text
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - started < 30, "Ray and vLLM were not started"


@pytest.mark.parametrize(("command", "code"), [("raises", 2), ("quits", 2)])
def test_command_that_fails_to_import_names_its_distribution(
    environment: Environment, tmp_path: Path, command: str, code: int
) -> None:
    text = environment.rlx(command, cwd=tmp_path, code=code)
    assert f"the command '{command}' of rlx-{command}" in text


def test_slow_component_costs_only_those_who_select_it(
    environment: Environment, tmp_path: Path
) -> None:
    started = time.monotonic()
    environment.rlx("plugins", "show", "loss", "rlx-twin-b/same", cwd=tmp_path)
    assert time.monotonic() - started < SLOW_SECONDS
    started = time.monotonic()
    environment.rlx("plugins", "show", "loss", "slow", cwd=tmp_path)
    assert time.monotonic() - started > SLOW_SECONDS


def test_names_say_which_one_is_meant(environment: Environment, workspace: Path) -> None:
    words = ["--reward", "mypkg:digits", "--loss", "rlx-twin-b/same", "--set", "rollout.groups=2"]
    environment.rlx(*train_arguments("out"), *words, cwd=workspace)
    manifest = json.loads((workspace / "out" / "manifest.json").read_text())
    chosen = {item["kind"]: item["distribution"] for item in manifest["components"]}
    assert chosen["losses"] == "rlx-twin-b"
    assert chosen["estimators"] == "rlx", "the name of a built-in is not taken over"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--estimator vandal", "estimator 'vandal' changed its input x.rewards in place"),
        ("--loss vandal", "loss 'vandal' changed its input x.advantages in place"),
    ],
)
def test_component_that_writes_to_its_inputs_ends_its_run(
    environment: Environment, workspace: Path, words: str, message: str
) -> None:
    arguments = [*train_arguments("out"), "--reward", "mypkg:digits", *words.split()]
    assert message in environment.rlx(*arguments, cwd=workspace, code=1)


def test_check_finds_the_components_that_write_to_their_inputs(
    environment: Environment, tmp_path: Path
) -> None:
    text = environment.rlx("plugins", "check", "rlx-vandal", cwd=tmp_path, code=1)
    for title in ("estimator", "loss", "reward"):
        assert f"FAIL {title} vandal" in text
    assert text.count("leaves its inputs as they are") == 3
    assert "did you mean 'rlx_on_step_end'" in environment.rlx(
        "plugins", "check", "rlx-misspelt", cwd=tmp_path, code=1
    )
