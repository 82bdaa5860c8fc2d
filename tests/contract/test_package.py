"""A whole plugin: checked from Python, from pytest and from the shell; scaffolded and listed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlx.cli.plugins import app
from rlx.core.errors import UsageError
from rlx.testing import ConformanceError, check_plugin
from rlx.testing.package import component_reports

ROOT = Path(__file__).resolve().parents[2]
MODULE = '''
"""Two losses, of which one is wrong."""
import rlx


def right(x, *, scale: float = 1.0):
    """Plain policy gradient.

    Formula: −ρA.
    Source: Sutton et al.,
    1999.

    Args:
        scale: factor of the loss.
    """
    return -x.ratio * x.advantages * scale


def wrong(x):
    return (-x.ratio * x.advantages).float()


@rlx.component(example={"power": 2})
def needs(x, *, power: int):
    return -x.ratio * x.advantages * power


def asks(x, *, power: int):
    return -x.ratio * x.advantages * power
'''


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    return result.output


@pytest.fixture
def plugin(install):
    points = {name: f"mod_check:{name}" for name in ("right", "wrong", "needs", "asks")}
    return install("rlx-check", {"rlx.losses": points}, {"mod_check.py": MODULE})


def test_check_plugin_lists_the_violations_of_all_components(plugin) -> None:
    with pytest.raises(ConformanceError) as caught:
        check_plugin("rlx-check")
    assert [violation.rule for violation in caught.value.violations] == [
        "loss wrong: keeps float64"
    ]


def test_components_with_required_parameters_are_checked_by_example_or_named(plugin) -> None:
    notes = {report.name: report.note for report in component_reports("rlx_check")}
    assert notes["needs"] == ""
    assert "power must be set" in notes["asks"]


def test_check_command_fails_and_names_the_component(plugin) -> None:
    result = CliRunner().invoke(app, ["check", "rlx-check"])
    assert result.exit_code == 1
    assert "FAIL loss wrong" in result.output
    assert "float64 inputs give torch.float32" in result.output
    assert "3 checked, 1 failed, 1 not checked" in result.output
    assert "skip loss asks not checked: power must be set" in result.output


def test_check_of_an_unknown_distribution_suggests_one(plugin) -> None:
    with pytest.raises(UsageError, match="did you mean 'rlx-check'"):
        check_plugin("rlx-chek")


def test_check_reports_hook_plugins_that_load_with_a_warning(install) -> None:
    source = "import rlx\n\n@rlx.hookimpl\ndef rlx_on_step_ends(step): ...\n"
    install("rlx-odd", {"rlx": {"odd": "mod_odd"}}, {"mod_odd.py": source})
    with pytest.raises(ConformanceError, match=r"did you mean 'rlx_on_step_end'"):
        check_plugin("rlx-odd")


def test_list_shows_summary_and_origin_without_importing(plugin) -> None:
    text = run("list", "loss")
    (row,) = [line for line in text.splitlines() if " right " in line]
    assert row.split() == ["right", "rlx-check", "0.3", "Plain", "policy", "gradient."]
    assert "mod_check" not in sys.modules
    assert "group_norm" not in text


def test_list_as_json_has_every_component(plugin) -> None:
    data = json.loads(run("list", "--json"))
    rows = {(row["kind"], row["name"]): row for row in data["components"]}
    assert rows["losses", "right"]["target"] == "mod_check:right"
    assert rows["estimators", "group_norm"]["builtin"]
    assert data["hooks"] == []


def test_list_leaves_out_what_is_switched_off(plugin, monkeypatch) -> None:
    assert "right" not in run("list", "losses", "--no-plugin", "rlx-check")
    monkeypatch.setenv("RLX_PLUGINS", "")
    assert "rlx-check" not in run("list")


def test_list_marks_conflicts_and_shadowed_names(install) -> None:
    install("rlx-a", {"rlx.losses": {"same": "mod_a:f", "ppo": "mod_a:f"}})
    install("rlx-b", {"rlx.losses": {"same": "mod_b:f"}})
    rows = json.loads(run("list", "losses", "--json"))["components"]
    names = {row["name"]: row["conflict"] for row in rows}
    assert names["rlx-a/same"]
    assert names["rlx-b/same"]
    assert names["rlx-a/ppo"] is False
    assert names["ppo"] is False


def test_list_shows_broken_hook_plugins(install) -> None:
    install("rlx-gone", {"rlx": {"gone": "mod_gone"}})
    install("rlx-syntax", {"rlx": {"syntax": "mod_syntax"}}, {"mod_syntax.py": "def (:\n"})
    install("rlx-late", {"rlx": {"late": "mod_late"}}, {"mod_late.py": "1 / 0\n"})
    install("rlx-fine", {"rlx": {"fine": "mod_fine"}}, {"mod_fine.py": "import rlx\n"})

    def states(*arguments: str) -> dict[str, str]:
        rows = json.loads(run("list", "--json", *arguments))["hooks"]
        return {row["name"]: row["state"] for row in rows}

    assert states() == {
        "fine": "installed",
        "gone": "broken",
        "late": "installed",
        "syntax": "broken",
    }
    with pytest.warns(UserWarning, match="failed to load"):
        loaded = states("--load")
    assert loaded == {"fine": "loaded", "gone": "broken", "late": "broken", "syntax": "broken"}
    assert "broken" in run("list")


def test_show_prints_parameters_formula_source_and_origin(plugin) -> None:
    text = run("show", "loss", "right")
    for part in ("−ρA.", "Sutton et al., 1999.", "rlx-check 0.3", "factor of the loss.", "float"):
        assert part in text
    schema = json.loads(run("show", "losses", "right", "--json"))
    assert schema["properties"]["scale"]["default"] == 1.0
    assert schema["additionalProperties"] is False


def test_show_of_a_parameter_that_json_can_not_express_leaves_it_open(install) -> None:
    source = (
        "from collections.abc import Callable\ndef f(x, *, g: Callable = len, k: int = 1): ...\n"
    )
    install("rlx-f", {"rlx.losses": {"f": "mod_f:f"}}, {"mod_f.py": source})
    assert json.loads(run("show", "loss", "f", "--json"))["properties"]["k"]["type"] == "integer"
    assert "Callable" in run("show", "loss", "f")


FIXTURES = """
import sys

def test_startup_imported_nothing_heavy():
    assert not {"torch", "hypothesis", "pydantic", "numpy"} & set(sys.modules)

def test_fixture(check_loss, loss_inputs):
    check_loss("mod_check:right", examples=5)
    x = loss_inputs(logprobs=[-1.0], advantages=[2.0])
    assert x.token_count == 1
"""


def test_pytest_plugin_gives_fixtures_and_costs_nothing_at_start(plugin, tmp_path: Path) -> None:
    (tmp_path / "test_mine.py").write_text(FIXTURES)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{plugin}", "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "rlx.testing.pytest_plugin", "test_mine.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
