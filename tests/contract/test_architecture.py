"""Who may import whom, and that the core knows no component's name."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlx.core.plugins import PluginSystem
from rlx.plugins.defaults import DEFAULTS

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("rlx.core.engine", "rlx.core", "rlx.plugins", "rlx.cli", "rlx.testing", "rlx.embedded")
"""Longest first: a module belongs to the first that it lies in."""
MAY_IMPORT = {
    "rlx.core": {"rlx.core"},
    "rlx.core.engine": {"rlx.core.engine", "rlx.core"},
    "rlx.plugins": {"rlx.core", "rlx.plugins"},
    "rlx.embedded": {"rlx.core", "rlx.embedded"},
    "rlx.cli": {"rlx.cli", "rlx.core", "rlx.core.engine", "rlx.plugins", "rlx.testing"},
    "rlx.testing": {"rlx", "rlx.core", "rlx.core.engine", "rlx.testing"},
    "rlx": {"rlx.cli", "rlx.core", "rlx.core.engine"},
}
EXCEPTIONS = {
    ("rlx.core.plugins", "rlx.plugins"): "registers the built-ins like any plugin",
    ("rlx.core.config_base", "rlx.plugins.defaults"): "asks which components a run has by default",
    ("rlx.core.models", "rlx.embedded"): "finds the model that ships with rlx",
    ("rlx.testing.package", "rlx.cli.main"): "loads commands as the command line does",
}
ONLY_THE_ENGINE = {"ray", "vllm", "deepspeed"}
NOT_THE_CORE = {"transformers", "fastapi", "uvicorn", "typer", "rich"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    source: str
    target: str
    at_top: bool
    """Runs when the module is imported."""


def part_of(module: str) -> str:
    for part in PARTS:
        if module == part or module.startswith(f"{part}."):
            return part
    return module.partition(".")[0]


def imports(path: Path) -> Iterator[Import]:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [str(node.module)]
        for name in names:
            yield Import(source=module, target=name, at_top=node in tree.body)


ALL = [one for path in sorted((ROOT / "rlx").rglob("*.py")) for one in imports(path)]


def test_imports_go_in_one_direction() -> None:
    wrong = [
        f"{one.source} imports {one.target}"
        for one in ALL
        if one.target.partition(".")[0] == "rlx"
        and part_of(one.target) not in MAY_IMPORT[part_of(one.source)]
        and (one.source, one.target) not in EXCEPTIONS
    ]
    assert wrong == []


def test_exceptions_are_still_needed_and_not_paid_for_at_import() -> None:
    found = {(one.source, one.target) for one in ALL if not one.at_top}
    assert set(EXCEPTIONS) <= found


def test_only_the_engine_imports_ray_vllm_and_deepspeed() -> None:
    users = {
        (one.source, one.target)
        for one in ALL
        if one.target.partition(".")[0] in ONLY_THE_ENGINE
        and part_of(one.source) != "rlx.core.engine"
    }
    assert users == set()
    assert not [one for one in ALL if one.at_top and one.target in ONLY_THE_ENGINE]


def test_core_imports_no_engine_of_others() -> None:
    users = {
        (one.source, one.target)
        for one in ALL
        if one.target.partition(".")[0] in NOT_THE_CORE and part_of(one.source) == "rlx.core"
    }
    assert users == set()


ORDINARY = frozenset(
    "code console curriculum dynamic judge jsonl math model none regex reinforce remote "
    "repetition retry uniform overlong".split()
)
"""Names that are also words: they may stand in prose and identifiers, not as a name in quotes."""
LEGITIMATE = {
    ("rlx/core/inputs.py", "batch_mean"): "the helper of the inputs, which was there first",
}
EVERYWHERE = frozenset({"model", "none"})
"""Values of many settings: forbidden only where a component is named or compared."""
NAMING = {"ComponentConfig", "RewardConfig", "resolve", "ref", "locate", "find", "add"}


def builtin_names() -> list[str]:
    registry = PluginSystem.load(hooks=False, rlxfile=False).registry
    return sorted({entry.name for entry in registry.entries() if entry.provider.builtin})


def core_files() -> list[Path]:
    return sorted((ROOT / "rlx" / "core").rglob("*.py"))


@pytest.mark.parametrize("name", [name for name in builtin_names() if name not in ORDINARY])
def test_core_does_not_contain_the_components_name(name: str) -> None:
    word = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in core_files()
        if word.search(path.read_text(encoding="utf-8"))
    }
    assert found <= set(LEGITIMATE)


def constants(tree: ast.AST) -> set[str]:
    return {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def where_components_are_named(tree: ast.AST) -> Iterator[ast.AST]:
    """Calls that take a component's name, and comparisons with one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else ast.unparse(function)
            if called in NAMING:
                yield node
        elif isinstance(node, (ast.Compare, ast.match_case)) and re.search(
            r"(estimator|loss|reward|agent|sampler|correction|tracker|bound|ref)s?(\[.*?\])?\.name",
            ast.unparse(node),
        ):
            yield node


@pytest.mark.parametrize("path", core_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_core_has_no_ordinary_word_as_a_components_name(path: Path) -> None:
    ordinary = ORDINARY & set(builtin_names())
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not constants(tree) & (ordinary - EVERYWHERE)
    for place in where_components_are_named(tree):
        assert not constants(place) & ordinary, ast.unparse(place)


def test_defaults_of_a_run_are_built_in() -> None:
    from rlx.core.component import kind_of
    from rlx.core.config import RunConfig

    system = PluginSystem.load(hooks=False, rlxfile=False)
    for setting, names in DEFAULTS.items():
        for name in names:
            assert system.registry.find(kind_of(setting), name) is not None
    config = RunConfig()
    assert (config.estimator.name,) == DEFAULTS["estimator"]
    assert tuple(one.name for one in config.trackers) == DEFAULTS["trackers"]
    assert config.rewards[0].weight == 1.0
    assert "rlx.plugins.defaults" in sys.modules
