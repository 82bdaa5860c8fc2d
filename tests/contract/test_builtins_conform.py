"""Every built-in passes its own kit."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.core.plugins import PluginSystem
from rlx.testing.package import CHECKS

EXAMPLES = 12
SLOW = {("rewards", "code"): 2}
"""Examples for components that start a process per call."""
PARAMS: dict[tuple[str, str], dict[str, Any]] = {
    ("rewards", "regex"): {"pattern": "4"},
    ("rewards", "overlong"): {"max_length": 8, "buffer": 4},
}
"""Values for parameters without a default."""
ELSEWHERE = {
    ("rewards", "remote"),
    ("rewards", "judge"),
    ("rewards", "model"),
    ("agents", "openai"),
    ("trackers", "wandb"),
}
"""They need a server, a model's folder, a program or a package of their own: `tests/plugins` checks
them with one."""


def builtins() -> list[tuple[str, str]]:
    system = PluginSystem.load(hooks=False, rlxfile=False)
    return [
        (entry.kind, entry.name)
        for entry in system.registry.entries()
        if entry.provider.builtin
        and entry.kind in CHECKS
        and (entry.kind, entry.name) not in ELSEWHERE
    ]


@pytest.mark.parametrize(("kind", "name"), builtins())
def test_builtin_conforms(kind: str, name: str) -> None:
    examples = SLOW.get((kind, name), EXAMPLES)
    CHECKS[kind](name, examples=examples, **PARAMS.get((kind, name), {}))
