"""docs/plugins.md: its Python examples run, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import rlx
from rlx.core.component import REQUIREMENTS
from rlx.testing import estimator_inputs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "plugins.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs(example: str) -> None:
    exec(example, {"__name__": "example"})


def test_example_estimator_is_the_built_in_one() -> None:
    names: dict[str, object] = {}
    exec(EXAMPLES[0], names)
    x = estimator_inputs(rewards=[0.0, 1.0, 3.0], group=[0, 0, 0])
    ours = rlx.resolve("estimators", names["zscore"], eps=1e-6)(x)
    assert torch.allclose(ours, rlx.resolve("estimators", "group_norm", eps=1e-6)(x))


def test_page_names_every_requirement() -> None:
    for requirement in REQUIREMENTS:
        assert f"`{requirement}`" in PAGE
