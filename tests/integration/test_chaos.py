"""The small version of `make chaos`: kills of a rollout engine and of the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_runs_survive_a_few_kills(tmp_path: Path):
    """About a minute: a Ray run whose engine is killed twice, inline runs whose driver is."""
    kept = tmp_path / "kept.json"
    words = ["--small", "--keep", str(kept), "--folder", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.chaos", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(kept.read_text())
    assert results["engine"]["injected"] >= 1
    assert results["driver"]["injected"] == results["driver"]["good"] == 2
    assert "| kill -9 of the driver (inline)" in done.stdout
