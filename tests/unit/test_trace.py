"""The trace of a run: valid at any moment, continued after a kill, capped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlx.core.engine.trace import BusyClock, Span, Trace


def events(path: Path) -> list[dict[str, Any]]:
    """As Perfetto reads it: the closing bracket may be missing."""
    return json.loads(path.read_text().rstrip().rstrip(",") + "]")


def spans(path: Path) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X"]


def tracks(path: Path) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"]
        for event in events(path)
        if event["name"] == "thread_name"
    }


def test_spans_lie_on_named_tracks_in_microseconds(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    trace.add("driver", Span("rollout", 1000.0, 1000.5), step=3)
    trace.add("engine 0", Span("busy", 1000.1, 1000.4))
    trace.flush()
    first, second = spans(tmp_path / "trace.json")
    assert (first["name"], first["ts"], first["dur"]) == ("rollout", 1_000_000_000, 500_000)
    assert first["args"] == {"step": 3}
    names = tracks(tmp_path / "trace.json")
    assert (names[first["tid"]], names[second["tid"]]) == ("driver", "engine 0")


def test_a_resumed_run_goes_on_behind_a_line_that_a_kill_cut_off(tmp_path: Path):
    path = tmp_path / "trace.json"
    for name in ("before", "after"):
        trace = Trace(path)
        trace.add("driver", Span(name, 1.0, 2.0))
        trace.close()
        if name == "before":
            with path.open("a") as file:
                file.write('{"name": "cut o')
    assert [event["name"] for event in spans(path)] == ["before", "after"]


def test_nothing_is_written_beyond_the_limit_or_without_a_path(tmp_path: Path):
    path = tmp_path / "trace.json"
    trace = Trace(path, limit=2000)
    for number in range(1000):
        trace.add("driver", Span(str(number), 1.0, 2.0))
    trace.close()
    assert 2000 <= path.stat().st_size < 2400
    assert len(spans(path)) < 30
    Trace(None).add("driver", Span("nowhere", 1.0, 2.0))
    Trace(tmp_path / "no" / "folder").add("driver", Span("nowhere", 1.0, 2.0))


def test_an_engine_is_busy_from_its_first_request_to_its_last_answer(tmp_path: Path):
    trace = Trace(tmp_path / "trace.json")
    clock = BusyClock(trace, "engine 0")
    for change in (2, 3, -4, -1, 1, -1):
        clock.add(change)
    trace.close()
    found = spans(tmp_path / "trace.json")
    assert [event["args"]["most"] for event in found] == [5, 1]
