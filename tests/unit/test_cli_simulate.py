"""`rlx plan --simulate`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_simulation import record

from rlx.cli.main import _exit_code

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rlx(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["rlx", "plan", "--simulate", *words])
        code = _exit_code()
        output = capsys.readouterr()
        return code, output.out + output.err

    return run


def test_a_recorded_run_is_played_with_other_counts(
    rlx: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    folder = record(tmp_path / "run")
    code, text = rlx(
        *("--recorded", str(folder), "--groups", "2", "--group-size", "2"),
        *("--max-staleness", "2", "--counts", "1x1", "--counts", "2x1"),
    )
    rows = [line.split() for line in text.splitlines() if line.strip()[:1].isdigit()]
    assert code == 0
    assert [row[:3] for row in rows] == [
        [engines, "1", staleness] for engines in "12" for staleness in "012"
    ]
    # In turns: what the recorded steps took, 2.6 s on average without the first two.
    assert float(rows[0][3]) == pytest.approx(2.6, rel=0.15)
    assert float(rows[1][3]) < float(rows[0][3])
    assert "simulated, not measured" in text


def test_timings_of_a_file_are_taken_and_checked(
    rlx: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    given = ROOT / "benchmarks" / "cluster_7b.yaml"
    code, text = rlx("--timings", str(given), "--groups", "4", "--group-size", "4")
    assert code == 0
    assert "engines idle" in text
    bad = tmp_path / "bad.yaml"
    bad.write_text("step: 0.1\nstep_per_sequence: -1\nupdate_per_token: 0.1\n")
    code, text = rlx("--timings", str(bad))
    assert code == 2
    assert "step_per_sequence" in text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ((), "how long things take"),
        (("--timings", "nowhere.yaml"), "can't be read"),
        (("--recorded", "nowhere"), "there is no run"),
    ],
)
def test_what_is_missing_is_told(
    rlx: Callable[..., tuple[int, str]], words: tuple[str, ...], text: str
) -> None:
    code, said = rlx(*words)
    assert code == 2
    assert text in said
    given = str(ROOT / "benchmarks" / "cluster_7b.yaml")
    assert "four engines, two learner ranks" in rlx("--timings", given, "--counts", "4")[1]
