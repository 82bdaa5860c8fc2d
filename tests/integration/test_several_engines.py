"""A run with two rollout engines is the run with one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from whole_runs import arguments, metrics, run

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def rollouts(folder: Path) -> list[dict[str, Any]]:
    """What was sampled, in an order that does not depend on when it came."""
    found = [
        json.loads(line)
        for path in sorted((folder / "rollouts").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return sorted(found, key=lambda one: (one["step"], one["group"], one["index"]))


def test_results_do_not_depend_on_the_number_of_engines(workspace: Path) -> None:
    """About 15 s: two steps with an evaluation, on one engine and on two."""
    (workspace / "eval.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 6)
    for engines in (1, 2):
        words = arguments(f"out-{engines}", steps=2, runtime="inline", engine="transformers")
        words += f"--set rollout.engines={engines} --set logging.rollouts=complete".split()
        words += "--eval-data eval.jsonl --set eval.every=1".split()
        run(workspace, words)
    one, two = (rollouts(workspace / f"out-{engines}") for engines in (1, 2))
    assert len(one) == 2 * 16
    assert [item["tokens"] for item in one] == [item["tokens"] for item in two]
    for left, right in zip(*(metrics(workspace / f"out-{n}") for n in (1, 2)), strict=True):
        assert left.keys() == right.keys()
        assert {**left, "time": 0} == pytest.approx({**right, "time": 0}, rel=1e-4, abs=1e-5)
    manifest = json.loads((workspace / "out-2" / "manifest.json").read_text())
    assert {"engine-0", "engine-1"} <= manifest["facts"].keys()
