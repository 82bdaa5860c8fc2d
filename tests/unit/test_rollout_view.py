"""What is recorded of an episode, and how `rlx runs rollouts` shows it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rich.console import Console

from rlx.cli.rollout_view import prompt_text, rollout_panel
from rlx.core.engine.batches import make_batch
from rlx.core.engine.records import groups_of, rollout_records
from rlx.core.errors import UsageError
from rlx.core.rollouts import Group, Rollout, Span, Task, TrainBatch
from rlx.plugins.trackers.jsonl import Jsonl
from rlx.testing.scripted import CharTokenizer

TEXT = "1+1=three#again:two!"
"""Prompt, action, observation, action, action."""
SPANS = [(4, 9, 0.0, 3), (16, 19, 0.5, 3), (19, 20, 0.0, 4)]


def rollout(index: int, *, segments: tuple[int, ...] = (0,), error: str | None = None) -> Rollout:
    return Rollout(
        task=Task(
            id="t/0",
            prompt="1+1=",
            tokens=[ord(c) for c in "1+1="],
            label=2,
            columns={"unit": "m"},
            source="t",
        ),
        group_id=5,
        index=index,
        tokens=np.array([ord(c) for c in TEXT], np.int32),
        spans=[
            Span(start=a, stop=b, version=v, finish_reason="stop", reward=r) for a, b, r, v in SPANS
        ],
        logprobs=np.random.default_rng(index).normal(size=9).astype(np.float32),
        text="two!",
        finish_reason="error" if error else "stop",
        reward=1 / 3,
        parts={"right": 1 / 3},
        metrics={"attempts": 2.0},
        segments=segments,
        error=error,
    )


def records(*rollouts: Rollout, limit: int | None, greedy: bool = False) -> list[dict[str, Any]]:
    first = rollouts[0]
    group = Group(id=5, task=first.task, rollouts=rollouts, greedy=rollout(9) if greedy else None)
    batch: TrainBatch = make_batch([group])
    advantages = np.linspace(-1, 1, batch.action_count).astype(np.float32)
    batch = dataclasses.replace(batch, advantages=advantages)
    found = rollout_records(
        [group],
        batch,
        batch.rollout_logprobs + np.float32(0.5),
        decode=CharTokenizer().decode,
        limit=limit,
    )
    return [{"step": 1, **json.loads(json.dumps(record))} for record in found]


def shown(record: dict[str, Any]) -> str:
    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(rollout_panel(record))
    return capture.get()


def test_the_pieces_are_the_rollout_in_order() -> None:
    (record,) = records(rollout(0), limit=8)
    pieces = record["episode"]
    assert [(piece["kind"], piece["text"]) for piece in pieces] == [
        ("action", "three"),
        ("observation", "#again:"),
        ("action", "two"),
        ("action", "!"),
    ]
    assert record["prompt"] + "".join(piece["text"] for piece in pieces) == TEXT
    assert [piece.get("reward") for piece in pieces] == [0.0, None, 0.5, 0.0]
    assert pieces[0]["advantage"] == pytest.approx(np.linspace(-1, 1, 9)[:5].mean())
    assert all(piece["logprob_gap"] == pytest.approx(0.5) for piece in pieces if "turn" in piece)
    assert "exact" not in record


def test_what_carried_loss_is_marked() -> None:
    (record,) = records(rollout(0), limit=8)
    lines = [line.strip("│ ") for line in shown(record).splitlines()]
    assert [line[2:] for line in lines if line.startswith("▌ ")] == ["three", "two", "!"]
    assert [line[2:] for line in lines if line.startswith("· ")] == ["1+1=", "#again:"]
    text = "\n".join(lines)
    assert "turn 2: 3 tokens, stop  reward +0.500" in text
    assert "reward 0.833 (right 0.333)" in text
    assert "9 tokens, 3 turns, stop, version 3" in text


def test_failures_and_segments_are_shown() -> None:
    (record,) = records(rollout(0, segments=(0, 9), error="KeyError: 'x'"), limit=8)
    assert [piece["kind"] for piece in record["episode"]][1] == "prompt"
    text = shown(record)
    assert "a new segment" in text
    assert "the agent failed: KeyError: 'x'" in text


def test_a_single_turn_needs_no_pieces() -> None:
    one = rollout(0)
    one = Rollout(
        task=one.task,
        group_id=5,
        index=0,
        tokens=one.tokens[:9],
        spans=one.spans[:1],
        logprobs=one.logprobs[:5],
        text="three",
        finish_reason="stop",
    )
    (record,) = records(one, limit=8)
    assert "episode" not in record
    assert "▌ three" in shown(record)
    assert "turn 1" not in shown(record)


def test_a_complete_record_is_the_rollout_to_the_bit() -> None:
    whole = [rollout(0), rollout(1, segments=(0, 9), error="x")]
    (group,) = groups_of(records(*whole, limit=None, greedy=True))
    assert group.greedy is not None
    for found, wanted in zip([*group.rollouts, group.greedy], [*whole, rollout(9)], strict=True):
        assert found.tokens.tolist() == wanted.tokens.tolist()
        assert found.tokens.dtype == np.int32
        assert found.logprobs.dtype == np.float32
        assert np.array_equal(found.logprobs, wanted.logprobs)
        assert [(s.start, s.stop, s.reward, s.version) for s in found.spans] == SPANS
        for name in ("reward", "parts", "metrics", "text", "finish_reason", "index", "error"):
            assert getattr(found, name) == getattr(wanted, name)
        assert tuple(found.segments) == tuple(wanted.segments)
        assert found.task == wanted.task


def test_what_utf8_can_not_hold_is_recorded_all_the_same(tmp_path: Path) -> None:
    tracker = Jsonl()
    logging = SimpleNamespace(rollouts_max_mib=1)
    tracker.start(
        cast(Any, SimpleNamespace(folder=tmp_path, config=SimpleNamespace(logging=logging)))
    )
    tracker.log_samples(1, [{"response": "half \ud83d"}])
    tracker.close()
    line = (tmp_path / "rollouts" / "step-000001.jsonl").read_text(encoding="utf-8")
    assert json.loads(line)["response"] == "half \ud83d"


def test_a_message_without_content_shows_its_calls() -> None:
    calls = [{"function": {"name": "add"}}]
    shown = prompt_text(
        [{"role": "assistant", "content": None, "tool_calls": calls}, {"role": "x"}]
    )
    assert shown == "assistant: [{'function': {'name': 'add'}}]\nx: "


@pytest.mark.parametrize(
    ("record", "told"),
    [({"step": 1}, "has no field 'prompt'"), ({"prompt": 3}, "can't be shown"), ([], "can't be")],
)
def test_a_record_that_is_not_whole_is_told(tmp_path: Path, record: object, told: str):
    from rlx.cli.runs import rollouts

    (tmp_path / "rollouts").mkdir()
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(UsageError, match=rf"step-000001.jsonl, line 1: the record {told}"):
        rollouts(str(tmp_path), root=tmp_path, step=None, count=5, as_json=False)
