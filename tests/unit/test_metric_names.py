"""Misspelt metrics in `faults.bounds` are told before a run starts; plugins' own stay possible."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from rlx.core.config import FaultsConfig
from rlx.core.metric_names import KNOWN, misspelt
from rlx.core.preflight_faults import bounds_findings

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_names_are_those_of_the_page():
    rows = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall("`([^`]+)`", row)}
    assert {name for name in named if "<" not in name and "@" not in name} == KNOWN


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("policy/grad_nrom", "policy/grad_norm"),
        ("polcy/kl_ref", "policy/kl_ref"),
        ("grad_norm", "policy/grad_norm"),
        ("nonsense", ""),
        ("policy/grad_norm", None),
        ("reward/math", None),
        ("policy/clip_rate_low", None),
        ("mine/spread", None),
        ("memory/learner_gib", None),
    ],
)
def test_only_a_name_that_nobody_else_can_have_meant_is_misspelt(written: str, meant: str | None):
    assert misspelt(written, []) == meant
    assert misspelt(written, [written.partition("/")[0]]) is None


@pytest.mark.parametrize(
    ("kind", "distribution", "told"),
    [
        ("losses", "rlx", True),
        ("losses", "rlx-foo", False),
        ("rewards", None, True),
        ("estimators", "rlx-foo", False),
    ],
)
def test_bound_on_a_misspelt_metric_ends_a_run_before_its_start(
    kind: str, distribution: str | None, told: bool
):
    component: Any = SimpleNamespace(name="mine", kind=kind, distribution=distribution)
    found = bounds_findings(["policy/grad_nrom", "policy/kl_ref"], [component])
    texts = [f"{finding.what}; {finding.fix}" for finding in found]
    wanted = (
        "faults.bounds: there is no metric 'policy/grad_nrom'; did you mean 'policy/grad_norm'?"
    )
    assert texts == ([wanted] if told else [])


def test_a_bound_is_of_an_absolute_value():
    assert FaultsConfig(bounds={"reward/failed": 0.0}).bounds == {"reward/failed": 0.0}
    with pytest.raises(ValidationError, match="greater than or equal to 0"):
        FaultsConfig(bounds={"policy/kl_ref": -1.0})
