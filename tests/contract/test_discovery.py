"""What installed plugins can and can't do to rlx: laziness, conflicts, breakage, switches."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import rlx
from rlx.core import api
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem, PluginWarning

EXPLODES = "raise RuntimeError('imported')\n"
HOOKS = """
import rlx

@rlx.hookimpl
def rlx_register_losses(registry):
    registry.add("hooked", "{module}_losses:hooked")
"""


def load(**options) -> PluginSystem:
    """Load and turn every warning into a failure."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return PluginSystem.load(**options)


def test_entry_points_are_names_and_nothing_is_imported_until_selected(install) -> None:
    install(
        "rlx-a", {"rlx.losses": {"alpha": "mod_a:f"}}, {"mod_a.py": "def f(x):\n    return x\n"}
    )
    install("rlx-b", {"rlx.losses": {"beta": "mod_b:f"}}, {"mod_b.py": EXPLODES})
    system = load()
    assert {"alpha", "beta"} <= set(system.names("losses"))
    assert not {"mod_a", "mod_b"} & set(sys.modules)
    ref = system.ref("losses", "alpha")
    assert (ref.distribution, ref.version) == ("rlx-a", "0.3")
    assert "mod_b" not in sys.modules, "only what is selected is imported"


def test_selected_component_that_fails_to_import_names_its_distribution(install) -> None:
    install("rlx-b", {"rlx.losses": {"beta": "mod_b:f"}}, {"mod_b.py": EXPLODES})
    with pytest.raises(UsageError) as caught:
        load().ref("losses", "beta", where="--loss")
    assert "loss 'beta' (rlx-b 0.3) could not be imported" in caught.value.what
    assert "RuntimeError: imported" in caught.value.what
    assert 'mod_b.py", line 1' in caught.value.what


def test_conflict_matters_only_when_selected(install) -> None:
    for letter in "ab":
        source = f"def f(x):\n    return '{letter}'\n"
        install(
            f"rlx-{letter}",
            {"rlx.losses": {"same": f"mod_{letter}:f"}},
            {f"mod_{letter}.py": source},
        )
    system = load()
    system.ref("losses", "ppo")
    with pytest.raises(UsageError, match=r"offered by rlx-a 0\.3 and rlx-b 0\.3"):
        system.ref("losses", "same")
    assert system.resolve("losses", "rlx-b/same")(0) == "b"


def test_builtin_name_stays_the_builtins(install) -> None:
    install(
        "rlx-a", {"rlx.losses": {"ppo": "mod_a:f"}}, {"mod_a.py": "def f(x):\n    return 'a'\n"}
    )
    system = load()
    assert system.ref("losses", "ppo").distribution == "rlx"
    assert system.resolve("losses", "rlx-a/ppo")(0) == "a"
    assert system.ref("losses", "rlx/ppo").distribution == "rlx"


def test_hook_plugin_registers_lazily_and_carries_its_distribution(install) -> None:
    modules = {
        "mod_h.py": HOOKS.format(module="mod_h"),
        "mod_h_losses.py": "def hooked(x):\n    return 7\n",
    }
    install("rlx-h", {"rlx": {"mine": "mod_h"}}, modules)
    system = load()
    assert "mod_h_losses" not in sys.modules
    ref = system.ref("losses", "hooked")
    assert (ref.distribution, ref.resolve()(0)) == ("rlx-h", 7)


def test_both_hook_plugins_with_one_entry_point_name_load(install) -> None:
    for letter in "ab":
        source = (
            "import rlx\n\n@rlx.hookimpl\ndef rlx_should_stop(step):\n"
            f"    return '{letter}' if step == {ord(letter)} else None\n"
        )
        install(f"rlx-{letter}", {"rlx": {"hooks": f"mod_{letter}"}}, {f"mod_{letter}.py": source})
    system = load()
    for letter in "ab":
        assert system.first("rlx_should_stop", run=None, step=ord(letter), metrics={}) == letter


@pytest.mark.parametrize(
    ("source", "error"),
    [
        (EXPLODES, "RuntimeError: imported"),
        ("raise SystemExit(2)\n", "SystemExit: 2"),
        ("import absent_library\n", "ModuleNotFoundError"),
        ("def broken(:\n", "SyntaxError"),
        ("import rlx\n\n@rlx.hookimpl\ndef rlx_on_step_end(stepp): ...\n", "stepp"),
        (
            "import rlx\n\n@rlx.hookimpl\ndef rlx_register_losses(registry):\n"
            "    registry.add('half', 'a:b')\n    registry.add('x', 'y')\n",
            "module:attr",
        ),
    ],
)
def test_broken_hook_plugin_is_a_warning_and_listed(install, source: str, error: str) -> None:
    install("rlx-bad", {"rlx": {"bad": "mod_bad"}}, {"mod_bad.py": source}, version="1.2")
    with pytest.warns(PluginWarning) as warned:
        system = PluginSystem.load()
    (message,) = [str(item.message) for item in warned]
    for part in ("'bad' (mod_bad)", "rlx-bad 1.2", "--no-plugin rlx-bad", error):
        assert part in message
    assert [item.entry_point for item in system.broken] == ["bad"]
    assert system.ref("losses", "ppo")
    assert "half" not in system.names("losses")
    broken = system.manifest()["broken"]
    assert broken[0]["distribution"] == "rlx-bad"
    assert "bad" not in str(system.manifest()["hooks"])


def test_hook_plugin_that_is_slow_to_load_is_named(install, monkeypatch) -> None:
    monkeypatch.setattr("rlx.core.plugins._SLOW", 0.05)
    install(
        "rlx-slow", {"rlx": {"slow": "mod_slow"}}, {"mod_slow.py": "__import__('time').sleep(0.1)"}
    )
    install("rlx-quick", {"rlx": {"quick": "mod_quick"}}, {"mod_quick.py": ""})
    (notice,) = load().notices
    assert "'slow' of rlx-slow 0.3 took 0.1 s to load" in notice
    assert "--no-plugin rlx-slow" in notice


def test_strict_mode_raises_for_a_broken_hook_plugin(install, monkeypatch) -> None:
    install("rlx-bad", {"rlx": {"bad": "mod_bad"}}, {"mod_bad.py": EXPLODES})
    monkeypatch.setenv("RLX_STRICT_PLUGINS", "1")
    with pytest.raises(UsageError, match="RuntimeError: imported"):
        PluginSystem.load()


@pytest.mark.parametrize("word", ["rlx-bad", "RLX_Bad", "bad"])
def test_disabled_plugin_is_not_even_imported(install, word: str) -> None:
    install("rlx-bad", {"rlx": {"bad": "mod_bad"}}, {"mod_bad.py": EXPLODES})
    assert load(disable=[word]).broken == []


@pytest.mark.parametrize(
    ("allowed", "names"),
    [("", set()), ("rlx-a", {"alpha"}), ("rlx-a, rlx_b", {"alpha", "beta"}), ("beta", {"beta"})],
)
def test_allow_list_admits_only_what_it_names(install, monkeypatch, allowed, names) -> None:
    install("rlx-a", {"rlx.losses": {"alpha": "mod_a:f"}})
    install("rlx-b", {"rlx.losses": {"beta": "mod_b:f"}})
    monkeypatch.setenv("RLX_PLUGINS", allowed)
    system = load()
    assert {"alpha", "beta"} & set(system.names("losses")) == names
    assert "ppo" in system.names("losses"), "built-ins are no plugins to switch off"


def test_allow_list_with_a_name_that_is_not_installed_warns(install, monkeypatch) -> None:
    install("rlx-alpha", {"rlx.losses": {"alpha": "mod_a:f"}})
    monkeypatch.setenv("RLX_PLUGINS", "rlx-alpa")
    with pytest.warns(PluginWarning, match=r"'rlx-alpa'.*did you mean 'rlx-alpha'"):
        PluginSystem.load()


def test_required_specifiers_are_checked(install) -> None:
    install("rlx-a", {"rlx.losses": {"alpha": "mod_a:f"}}, version="0.3.1")
    load(required=["rlx-a>=0.3", "RLX_A<1"])
    with pytest.raises(UsageError, match=r"rlx-a 0\.3\.1 is installed"):
        load(required=["rlx-a>=0.4"])
    with pytest.raises(UsageError, match="'rlx-none' is not installed"):
        load(required=["rlx-none"])
    with pytest.raises(UsageError, match="is no requirement"):
        load(required=["rlx a >"])


def test_editable_install_that_is_seen_twice_counts_once(install, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    points = {"rlx.losses": {"alpha": "mod_a:f"}}
    install("rlx-a", points, {"mod_a.py": "def f(x):\n    return x\n"})
    info = checkout / "RLX.A.egg-info"
    info.mkdir()
    (info / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: RLX.A\nVersion: 0.2\n\n")
    (info / "entry_points.txt").write_text("[rlx.losses]\nalpha = mod_a:f\n")
    sys.path.insert(1, str(checkout))
    system = load()
    assert system.ref("losses", "alpha").version == "0.3"
    assert system.registry.conflicts("losses", "alpha") == []


def test_entry_point_without_attribute_is_reported(install) -> None:
    install("rlx-a", {"rlx.losses": {"alpha": "mod_a"}})
    with pytest.warns(PluginWarning, match=r"the loss 'alpha' has no target module:attr"):
        system = PluginSystem.load()
    assert "alpha" not in system.names("losses")


def test_rlxfile_of_the_working_directory_is_a_hook_plugin(install) -> None:
    install("rlx-none", {})
    Path("rlxfile.py").write_text(
        "import rlx\n\ndef half(x, *, by: float = 2.0):\n    return x / by\n\n"
        "@rlx.hookimpl\ndef rlx_register_losses(registry):\n    registry.add('half', half)\n"
    )
    system = load()
    assert "--no-rlxfile" in system.notices[0]
    assert system.resolve("losses", "half", {"by": 4})(2) == 0.5
    assert system.ref("losses", "half").target.endswith("rlxfile.py:half")
    for without in (load(rlxfile=False), load(disable=["rlxfile"]), load(hooks=False)):
        assert "half" not in without.names("losses")
        assert without.notices == []


def test_allow_list_covers_the_rlxfile(install, monkeypatch) -> None:
    Path("rlxfile.py").write_text(EXPLODES)
    monkeypatch.setenv("RLX_PLUGINS", "")
    assert load().broken == []


def test_plugin_for_an_older_api_is_told_what_changed(install, monkeypatch) -> None:
    source = "RLX_API_VERSION = 1\n\ndef f(x):\n    return x\n"
    install("rlx-a", {"rlx.losses": {"alpha": "mod_a:f"}}, {"mod_a.py": source})
    load().ref("losses", "alpha")
    monkeypatch.setattr(api, "API_VERSION", 3)
    monkeypatch.setattr(api, "CHANGES", {2: "groups are tuples", 3: "x.turn is int32"})
    system = load()
    with pytest.warns(PluginWarning) as warned:
        refs = [system.ref("losses", "alpha") for _ in range(2)]
    assert refs[0] == refs[1]
    (message,) = [str(item.message) for item in warned]
    assert "loss 'alpha' (rlx-a 0.3) was built for version 1" in message
    assert "version 2: groups are tuples; version 3: x.turn is int32" in message


def test_hook_plugin_for_an_older_api_is_told_what_changed_and_works(install, monkeypatch) -> None:
    install("rlx-h", {"rlx": {"mine": "mod_h"}}, {"mod_h.py": "RLX_API_VERSION = 1\n" + HOOKS})
    monkeypatch.setattr(api, "API_VERSION", 2)
    monkeypatch.setattr(api, "CHANGES", {2: "groups are tuples"})
    with pytest.warns(PluginWarning, match=r"'mine' of rlx-h 0\.3 .* version 2: groups are tuples"):
        system = PluginSystem.load()
    assert "hooked" in system.names("losses")


@pytest.mark.parametrize("stated", ['"1"', "1.5"])
def test_api_version_that_is_no_whole_number_is_reported(install, stated: str) -> None:
    source = f"RLX_API_VERSION = {stated}\n\ndef f(x):\n    return x\n"
    install("rlx-a", {"rlx.losses": {"alpha": "mod_a:f"}}, {"mod_a.py": source})
    with pytest.warns(PluginWarning, match="it is a whole number"):
        PluginSystem.load().ref("losses", "alpha")


def test_plugin_for_a_newer_api_asks_for_an_upgrade(install) -> None:
    source = "import rlx\n\n@rlx.component(api_version=99)\ndef f(x):\n    return x\n"
    install("rlx-a", {"rlx.losses": {"alpha": "mod_a:f"}}, {"mod_a.py": source})
    system = load()
    with pytest.warns(PluginWarning, match=r"version 99 .* upgrade rlx"):
        system.ref("losses", "alpha")


def test_manifest_is_json_with_the_provenance_of_everything(install) -> None:
    install(
        "rlx-h",
        {"rlx": {"mine": "mod_h"}, "rlx.losses": {"alpha": "mod_a:f"}},
        {
            "mod_h.py": HOOKS.format(module="mod_h"),
            "mod_a.py": "def f(x, *, k: int = 1):\n    return x\n",
        },
    )
    system = load()
    manifest = system.manifest([system.ref("losses", "alpha", {"k": 2})])
    assert json.loads(json.dumps(manifest)) == manifest
    assert manifest["distributions"] == {"rlx-h": "0.3"}
    assert manifest["hooks"]["rlx-h:mine"] == ["rlx_register_losses"]
    assert len(manifest["hook_sources"]["rlx-h:mine"]) == 64
    (component,) = manifest["components"]
    assert component["params"] == {"k": 2}
    assert len(component["source_hash"]) == 64
    assert manifest["api_version"] == rlx.API_VERSION


def test_python_api_resolves_builtins_and_installed_names(install) -> None:
    install(
        "rlx-a",
        {"rlx.losses": {"alpha": "mod_a:f"}},
        {"mod_a.py": "def f(x, *, k: int):\n    return x * k\n"},
    )
    assert rlx.resolve("loss", "alpha", k=3)(2) == 6
    with pytest.raises(UsageError, match="did you mean 'group_norm'"):
        rlx.resolve("estimators", "group_nrm")


def test_rlx_starts_when_a_builtin_file_is_missing(tmp_path: Path) -> None:
    import shutil

    shutil.copytree(
        Path(rlx.__file__).parent, tmp_path / "rlx", ignore=shutil.ignore_patterns("model")
    )
    (tmp_path / "rlx/plugins/losses/gspo.py").unlink()
    code = (
        "import rlx; from rlx.core.plugins import PluginSystem; s = PluginSystem.load();"
        "assert rlx.__file__.startswith('PLACE'); s.ref('losses', 'ppo')\n"
        "try: s.ref('losses', 'gspo')\nexcept rlx.UsageError as e: print(e)"
    ).replace("PLACE", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "loss 'gspo'" in done.stdout, done.stderr
