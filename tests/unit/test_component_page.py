"""What a component's docstring becomes on its page and in the table of algorithms."""

from __future__ import annotations

import inspect
import io

import pytest
from rich.console import Console

from rlx.cli.plugin_page import (
    component_page,
    docstring_section,
    docstring_summary,
    reflowed,
)
from rlx.core.plugins import PluginSystem

SYSTEM = PluginSystem.load(hooks=False, rlxfile=False)
KINDS = ("estimators", "losses", "corrections")
BUILTINS = [(kind, name) for kind in KINDS for name in SYSTEM.names(kind) if "/" not in name]


def test_colon_in_the_first_sentence_begins_no_section() -> None:
    text = "Clipped surrogate: no reward outside.\n\nFormula: −A.\nUse: the default."
    assert docstring_summary(text) == "Clipped surrogate: no reward outside."
    assert docstring_section(text, "Formula") == "−A."
    assert docstring_section(text, "Use") == "the default."


def test_paragraphs_fit_any_width_and_what_is_indented_stays() -> None:
    text = "One\nparagraph.\n\n    a = b\n    c = d\n\nAnother\none."
    assert reflowed(text) == "One paragraph.\n\n    a = b\n    c = d\n\nAnother one."


@pytest.mark.parametrize(
    ("kind", "name", "way"),
    [
        ("estimators", "gpg", "next: rlx train --estimator gpg"),
        ("rewards", "regex", "next: rlx train --reward regex --set rewards.0.pattern=VALUE"),
    ],
)
def test_page_ends_with_the_way_to_use_it(kind: str, name: str, way: str) -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    component_page(SYSTEM.locate(kind, name), console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[-1].startswith(way)
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(("kind", "name"), BUILTINS)
def test_builtin_says_what_it_computes_and_when_to_use_it(kind: str, name: str) -> None:
    text = inspect.getdoc(SYSTEM.locate(kind, name).load()) or ""
    assert docstring_summary(text).endswith(".")
    for section in ("Formula", "Use", *(() if name == "none" else ("Source",))):
        assert docstring_section(text, section), section
