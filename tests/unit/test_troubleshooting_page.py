"""Every message that docs/troubleshooting.md explains is one that the code really raises."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def template(node: ast.AST) -> str:
    """The text of a string or an f-string with … for what is filled in; empty for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "…" for part in node.values)
    return ""


def messages() -> Iterator[str]:
    for path in sorted((ROOT / "rlx").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        yield from filter(None, map(template, ast.walk(tree)))


KNOWN = "\n".join(messages())


def test_page_explains_a_fair_number_of_messages():
    assert len(HEADINGS) == len(set(HEADINGS)) >= 25


@pytest.mark.parametrize("heading", HEADINGS)
def test_message_is_in_the_code(heading: str):
    assert heading in KNOWN


def test_settings_that_the_page_names_exist():
    from rlx.core.config import RunConfig

    sections = RunConfig.model_fields.keys()
    named = set(re.findall(r"\b([a-z]+\.[a-z_]+)\b", PAGE))
    settings = {
        name
        for name in named
        if name.split(".")[0] in sections and not name.endswith((".jsonl", ".json"))
    }
    assert len(settings) > 15
    for name in settings:
        section, key = name.split(".")
        part = RunConfig.model_fields[section].annotation
        assert key in getattr(part, "model_fields", {}), name
