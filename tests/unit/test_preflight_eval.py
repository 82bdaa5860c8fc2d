"""Settings of evaluation that don't fit together are found before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.core.config import RunConfig
from rlx.core.preflight_eval import eval_complaints


def complaints(settings: dict[str, Any]) -> list[str]:
    config = RunConfig.model_validate(settings)
    return [" | ".join(found) for found in eval_complaints(config, context=64)]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"eval": {"sources": "x"}},
        {"eval": {"sources": "x", "samples": 8}},
        {"eval": {"sources": "x", "samples": 8, "temperature": 0.6, "every": 5}},
        {"eval": {"sources": "x", "max_new_tokens": 63}},
    ],
)
def test_fitting_settings_raise_no_complaint(settings: dict[str, Any]) -> None:
    assert complaints(settings) == []


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"eval": {"every": 5}}, "eval.every is set, and there is no data"),
        ({"eval": {"before_training": True}}, "eval.before_training is set"),
        ({"checkpoint": {"best": "eval/x/mean"}}, "checkpoint.best is set"),
        ({"eval": {"sources": "x", "samples": 4, "temperature": 0}}, "would all be the same"),
        ({"eval": {"sources": "x", "max_new_tokens": 64}}, "leave no room for a prompt"),
    ],
)
def test_each_mistake_is_found_once(settings: dict[str, Any], expected: str) -> None:
    (found,) = complaints(settings)
    assert expected in found
