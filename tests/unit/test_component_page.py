"""What a component's docstring becomes on its page and in the table of algorithms."""

from __future__ import annotations

import inspect

import pytest

from rlx.cli.plugin_page import docstring_section, docstring_summary
from rlx.core.plugins import PluginSystem

SYSTEM = PluginSystem.load(hooks=False, rlxfile=False)
KINDS = ("estimators", "losses", "corrections")
BUILTINS = [(kind, name) for kind in KINDS for name in SYSTEM.names(kind) if "/" not in name]


def test_colon_in_the_first_sentence_begins_no_section() -> None:
    text = "Clipped surrogate: no reward outside.\n\nFormula: −A.\nUse: the default."
    assert docstring_summary(text) == "Clipped surrogate: no reward outside."
    assert docstring_section(text, "Formula") == "−A."
    assert docstring_section(text, "Use") == "the default."


@pytest.mark.parametrize(("kind", "name"), BUILTINS)
def test_builtin_says_what_it_computes_and_when_to_use_it(kind: str, name: str) -> None:
    text = inspect.getdoc(SYSTEM.locate(kind, name).load()) or ""
    assert docstring_summary(text).endswith(".")
    for section in ("Formula", "Use", *(() if name == "none" else ("Source",))):
        assert docstring_section(text, section), section
