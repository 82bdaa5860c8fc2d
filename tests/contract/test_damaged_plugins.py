"""Plugins that are damaged, misnamed or switched off: said plainly, and felt by nobody else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from conftest import write_distribution
from typer.testing import CliRunner

from rlx.cli.main import app as main
from rlx.cli.plugin_list import component_lines, component_row
from rlx.cli.plugins import app
from rlx.core.api import version_warning
from rlx.core.discovery import check_required, scan
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem

GOOD = {"rlx.losses": {"good": "mod_good:good"}}
LOSS = "def good(x):\n    return -x.ratio * x.advantages\n"


def warned_by_loading(**options) -> tuple[PluginSystem, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        system = PluginSystem.load(**options)
    return system, [str(item.message) for item in caught]


@pytest.mark.parametrize(
    ("points", "metadata", "told"),
    [
        (b"[rlx.losses]\nx = a\xff:b\n", None, "is not name = module:attr"),
        (b"[rlx.losses]\nno target\n", None, "the entry point 'no target'"),
        (b"[rlx.losses]\nx = 1 + 1\n[rlx]\nh = not a module!\n", None, "is not name = module:attr"),
        (b"[rlx.loss]\nx = a:b\n", None, "did you mean 'rlx.losses'?"),
        (b"[rlx.command]\nx = a:b\n", None, "did you mean 'rlx.commands'?"),
        (b"[rlx.losses]\nx = a:b\n", b"Name: odd\nVersion: \xff\n", None),
        (b"[rlx.losses]\nx = a:b\n", b"", None),
        (b"x = a:b\n[rlx.losses\n", None, None),
    ],
)
def test_damaged_metadata_is_passed_over_with_a_warning(
    install, points: bytes, metadata: bytes | None, told: str | None
) -> None:
    site = install("rlx-good", GOOD, {"mod_good.py": LOSS})
    info = site / "odd-1.0.dist-info"
    info.mkdir()
    (info / "entry_points.txt").write_bytes(points)
    (info / "METADATA").write_bytes(b"Name: odd\nVersion: 1.0\n" if metadata is None else metadata)
    system, messages = warned_by_loading()
    assert "good" in system.names("losses")
    assert "ppo" in system.names("losses")
    if told is None:
        assert not messages
    else:
        assert any(told in message and "odd 1.0" in message for message in messages), messages
    for arguments in (["--help"], ["plugins", "list"]):
        assert CliRunner().invoke(main, arguments, catch_exceptions=False).exit_code == 0
    _, messages = warned_by_loading(disable=["odd"])
    assert not messages


@pytest.mark.parametrize(
    "source",
    [
        "class Odd(BaseException): ...\nraise Odd('from below')\n",
        "import pytest\npytest.skip('from below', allow_module_level=True)\n",
    ],
)
def test_module_may_raise_anything(install, source: str) -> None:
    points = {"rlx": {"odd": "mod_odd_hooks"}, "rlx.losses": {"odd": "mod_odd:f"}}
    install("rlx-odd", points, {"mod_odd_hooks.py": source, "mod_odd.py": source})
    system, (message,) = warned_by_loading()
    assert "from below" in message
    assert "--no-plugin rlx-odd" in message
    with pytest.raises(UsageError, match="from below"):
        system.ref("losses", "odd")


def test_hook_module_of_two_distributions_is_used_once(install) -> None:
    install("rlx-one", {"rlx": {"one": "mod_shared"}}, {"mod_shared.py": "import rlx\n"})
    install("rlx-two", {"rlx": {"two": "mod_shared"}})
    system, (message,) = warned_by_loading()
    assert "rlx-one:one registers the same module already" in message
    assert system.hook.plugins() == ["rlx", "rlx-one:one"]


def test_what_a_plugin_prints_at_import_stays_out_of_the_output(install) -> None:
    loud = f"print('hello')\n{LOSS}"
    install("rlx-loud", {**GOOD, "rlx": {"loud": "mod_loud"}}, {"mod_good.py": loud})
    (Path(sys.path[0]) / "mod_loud.py").write_text("print('hooks')\n")
    result = CliRunner().invoke(app, ["show", "loss", "good", "--json"], catch_exceptions=False)
    assert json.loads(result.stdout)["title"] == "good"
    assert {"hello", "hooks"} <= set(result.stderr.split())


def test_name_that_is_switched_off_says_so(install, monkeypatch) -> None:
    install("rlx-good", GOOD, {"mod_good.py": LOSS})
    for name in ("good", "rlx-good/good"):
        with pytest.raises(UsageError, match=r"'good' of rlx-good 0\.3 is switched off") as caught:
            PluginSystem.load(disable=["rlx_good"]).ref("losses", name)
        assert "remove --no-plugin rlx-good" in caught.value.fix
    monkeypatch.setenv("RLX_PLUGINS", "")
    with pytest.raises(UsageError, match="is switched off") as caught:
        PluginSystem.load().ref("losses", "good")
    assert "RLX_PLUGINS" in caught.value.fix


def test_name_of_another_distribution_is_used_where_one_is_switched_off(install) -> None:
    for letter in "ab":
        install(f"rlx-{letter}", {"rlx.losses": {"same": "mod_good:good"}}, {"mod_good.py": LOSS})
    assert PluginSystem.load(disable=["rlx-a"]).ref("losses", "same").distribution == "rlx-b"


def test_misspelt_switch_is_told_and_one_for_another_machine_is_not(install) -> None:
    install("rlx-good", GOOD, {"mod_good.py": LOSS})
    _, (message,) = warned_by_loading(disable=["rlx-godo"])
    assert "did you mean 'rlx-good'" in message
    assert warned_by_loading(disable=["elsewhere"])[1] == []
    _, (message,) = warned_by_loading(disable=["rlx"])
    assert "can't be switched off" in message


def test_requirement_for_another_platform_is_not_checked() -> None:
    check_required(["rlx-absent>=1; python_version < '3'"])
    with pytest.raises(UsageError, match="is not installed"):
        check_required(["rlx-absent>=1; python_version > '3'"])


@pytest.mark.parametrize("stated", [0, -3, "1", True, 1.0])
def test_api_version_that_never_was_is_told(stated: object) -> None:
    def f(x): ...

    f.RLX_API_VERSION = stated
    assert f"states the plugin API version {stated!r}; it is a whole number from 1 on" in str(
        version_warning(f, "loss 'f'")
    )


COMMANDS = """
import typer

number = 5
empty = typer.Typer()
app = typer.Typer()

@app.command()
def hello(): ...
"""


def test_command_that_is_no_typer_app_is_refused_and_found_by_check(install) -> None:
    names = ("number", "empty", "absent", "app")
    points = {"rlx.commands": {f"my-{name}": f"mod_commands:{name}" for name in names}}
    points["rlx.commands"]["train"] = "mod_commands:app"
    install("rlx-commands", points, {"mod_commands.py": COMMANDS})
    for name, words in (
        ("number", "is a int, not a Typer app"),
        ("empty", "can't be imported"),
        ("absent", "has no attribute 'absent'"),
    ):
        with pytest.raises(UsageError, match=words):
            CliRunner().invoke(main, [f"my-{name}"], catch_exceptions=False)
    assert CliRunner().invoke(main, ["my-app"], catch_exceptions=False).exit_code == 0
    result = CliRunner().invoke(app, ["check", "rlx-commands"])
    assert result.exit_code == 1
    assert "ok   command my-app" in result.output
    assert result.output.count("FAIL command") == 4
    assert "FAIL command train" in result.output
    assert "5 checked, 4 failed" in result.output


def test_list_shows_commands_and_why_one_is_not_used(install) -> None:
    site = install("rlx-a", {"rlx.commands": {"train": "json", "same": "json", "fine": "json"}})
    install("rlx-b", {"rlx.commands": {"same": "json", "gone": "mod_absent:app"}})
    result = CliRunner().invoke(app, ["list", "--json"], catch_exceptions=False)
    rows = {
        (row["name"], row["distribution"]): row for row in json.loads(result.stdout)["commands"]
    }
    assert rows["fine", "rlx-a"]["state"] == "installed"
    for key, words in (
        (("train", "rlx-a"), "rlx has a command of this name"),
        (("same", "rlx-a"), "several distributions"),
        (("same", "rlx-b"), "several distributions"),
        (("gone", "rlx-b"), "there is no module"),
    ):
        assert words in rows[key]["error"]
    with pytest.raises(UsageError, match="offered by rlx-a and rlx-b") as caught:
        CliRunner().invoke(main, ["same"], catch_exceptions=False)
    assert caught.value.fix == "uninstall one, or use one alone: RLX_PLUGINS=rlx-a rlx same"
    assert site.is_dir()


def test_names_are_never_cut_in_a_terminal_of_80_columns(install) -> None:
    name = "a_name_of_thirty_characters_xx"
    install("rlx-long-distribution", {"rlx.losses": {name: "mod_good:good"}}, {"mod_good.py": LOSS})
    system = PluginSystem.load()
    rows = [component_row(system, entry) for entry in system.registry.entries()]
    lines = str(component_lines(rows, 80)).splitlines()
    assert max(map(len, lines)) <= 80
    for row in rows:
        assert any(f" {row['name']} " in line for line in lines), row["name"]
    assert any("rlx-long-distribution 0.3" in line for line in lines)


def test_an_installation_that_is_seen_twice_counts_once(tmp_path: Path, monkeypatch) -> None:
    for version in ("1.0", "2.0"):
        folder = tmp_path / version
        write_distribution(folder, "Rlx_Twice", GOOD, version=version)
        monkeypatch.syspath_prepend(str(folder))
    (found,) = [item for item in scan() if item.provider.distribution == "rlx-twice"]
    assert found.provider.version == "2.0"


@pytest.mark.parametrize("content", [b"1 / 0\n", b"\xff\xfe"])
def test_broken_rlxfile_is_a_warning_and_said_to_be_in_use_nowhere(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "rlxfile.py").write_bytes(content)
    system, (message,) = warned_by_loading(search_path=[tmp_path])
    assert "failed to load and is not used" in message
    assert system.notices == []
    assert warned_by_loading(search_path=[tmp_path], disable=["rlxfile"])[1] == []


def test_metadata_that_libraries_choke_on_is_named(install, tmp_path: Path) -> None:
    """pydantic, vLLM and others read the entry points of everything that is installed."""
    site = install("rlx-good", GOOD, {"mod_good.py": LOSS})
    info = site / "odd-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: odd\nVersion: 1.0\n")
    (info / "entry_points.txt").write_bytes(b"[pydantic]\nx = a\xff:b\n")
    command = [sys.executable, "-m", "rlx", "train", "--dry-run"]
    path = os.pathsep.join([str(site), str(Path(__file__).parents[2])])
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2, done.stderr
    assert "odd-1.0.dist-info/entry_points.txt" in "".join(done.stderr.split())
    assert "Traceback" not in done.stderr
