"""What listing costs: nothing heavy is imported, and many plugins are hardly felt."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rlx
from rlx.cli.main import app as main
from rlx.core.plugins import PluginSystem

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "ray", "vllm", "deepspeed", "transformers", "datasets", "hypothesis")
PLUGINS = 200
MODULE = '''
"""A plugin."""
raise AssertionError("imported")


def estimate(x, *, eps: float = 1e-6):
    """Advantages of plugin {number}."""


def other(x, *, k: int = 1):
    """Something else."""
'''

HOOK = """
import rlx

@rlx.hookimpl
def rlx_on_step_end(run, step, metrics):
    pass
"""


def imported_by(code: str, *path: Path) -> set[str]:
    """Return the modules that a fresh interpreter has after running the code."""
    script = f"{code}\nimport sys\nprint('\\nmodules:', *sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": ":".join(map(str, [ROOT, *path]))},
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("modules:")[2].split())


LISTING = """
from typer.testing import CliRunner
from rlx.cli.plugins import app
result = CliRunner().invoke(app, {arguments!r}, catch_exceptions=False)
assert result.exit_code == 0, result.output
assert 'lazy' in result.output, result.output
"""


@pytest.mark.parametrize("arguments", [["list"], ["list", "loss"], ["list", "--json"]])
def test_listing_imports_no_plugin_and_nothing_heavy(install, arguments: list[str]) -> None:
    site = install(
        "rlx-lazy",
        {"rlx.losses": {"lazy": "mod_lazy:estimate"}, "rlx": {"hooks": "mod_hooks"}},
        {"mod_lazy.py": MODULE, "mod_hooks.py": MODULE},
    )
    modules = imported_by(LISTING.format(arguments=arguments), site)
    assert not {"mod_lazy", "mod_hooks", *HEAVY} & modules
    assert not [name for name in modules if name.startswith("rlx.plugins.")]


def test_importing_rlx_costs_nothing() -> None:
    modules = imported_by("import rlx; rlx.API_VERSION")
    assert not {"pydantic", "pluggy", "numpy", *HEAVY} & modules


def test_loading_the_plugin_system_imports_no_component() -> None:
    modules = imported_by("from rlx.core.plugins import PluginSystem; PluginSystem.load()")
    assert not {"numpy", *HEAVY} & modules
    assert not [name for name in modules if name.startswith("rlx.plugins.")]


def test_selecting_a_reward_does_not_import_torch() -> None:
    modules = imported_by("import rlx; rlx.resolve('rewards', 'exact_match')")
    assert "torch" not in modules


def best_of_five(action: Callable[[], object]) -> float:
    """Processor seconds of the quickest run: what else the machine does is not in them."""
    importlib.invalidate_caches()
    times = []
    for _ in range(5):
        begin = time.process_time()
        action()
        times.append(time.process_time() - begin)
    return min(times)


def command_line(*arguments: str) -> None:
    result = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output


def start_training() -> None:
    """What of `rlx train`'s start depends on what is installed, modules loaded afresh."""
    for name in [name for name in sys.modules if name.startswith("mod_hooks_")]:
        del sys.modules[name]
    PluginSystem.load()


COSTS = {
    "rlx --help": (lambda: command_line("--help"), 0.1),
    "rlx plugins list": (lambda: command_line("plugins", "list"), 0.1),
    "rlx train": (start_training, 0.2),
}
"""Command → its work and the seconds that 200 plugins may add to it."""


def test_two_hundred_plugins_are_hardly_felt(install) -> None:
    before = {name: best_of_five(work) for name, (work, _) in COSTS.items()}
    for number in range(PLUGINS):
        points = {"rlx.estimators": {f"many{number}": f"mod_many_{number}:estimate"}}
        modules = {f"mod_many_{number}.py": MODULE.format(number=number)}
        if number % 10 == 0:
            points["rlx"] = {"hooks": f"mod_hooks_{number}"}
            modules[f"mod_hooks_{number}.py"] = HOOK
        if number % 20 == 0:
            points["rlx.commands"] = {f"many{number}": f"mod_many_{number}:app"}
        install(f"rlx-many-{number}", points, modules)
    start_training()  # compiles the hook modules, which pip does when it installs
    after = {name: best_of_five(work) for name, (work, _) in COSTS.items()}
    names = PluginSystem.load().names("estimators")
    assert sum(name.startswith("many") for name in names) == PLUGINS
    added = {name: after[name] - before[name] for name in COSTS}
    print({name: f"{seconds:.3f} s" for name, seconds in added.items()})
    for name, (_, budget) in COSTS.items():
        assert added[name] < budget, f"{name}: {added[name]:.3f} s"


def test_every_public_name_resolves_and_is_typed() -> None:
    source = Path(rlx.__file__).read_text(encoding="utf-8")
    typed = source[source.index("if TYPE_CHECKING") : source.index("_HOMES")]
    for name in rlx.__all__:
        assert getattr(rlx, name) is not None
        assert name.startswith(("__", "API")) or name in typed
    assert set(rlx.__all__) <= set(dir(rlx))
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        rlx.tarin  # noqa: B018


def test_every_name_of_the_kit_resolves() -> None:
    import rlx.testing

    for name in rlx.testing.__all__:
        assert callable(getattr(rlx.testing, name))
    with pytest.raises(AttributeError):
        rlx.testing.check_nothing  # noqa: B018


COMMAND = """
import typer

app = typer.Typer()


@app.command()
def hello(name: str = "world") -> None:
    \"\"\"Greet.\"\"\"
    typer.echo(f"hello {name}")
"""


def test_command_of_a_plugin_is_in_the_help_without_import_and_runs(install) -> None:
    site = install(
        "rlx-cmd",
        {"rlx.commands": {"greet": "mod_cmd:app", "broken": "mod_absent:app"}},
        {"mod_cmd.py": COMMAND},
    )
    run = "from typer.testing import CliRunner; from rlx.cli.main import app; "
    run += "r = CliRunner().invoke(app, {arguments!r}); assert {word!r} in r.output, r.output"
    modules = imported_by(run.format(arguments=["--help"], word="greet"), site)
    assert not {"mod_cmd", *HEAVY} & modules
    modules = imported_by(run.format(arguments=["greet", "--name", "you"], word="hello you"), site)
    assert "mod_cmd" in modules
