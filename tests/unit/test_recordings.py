"""What a recording must fit before a replay starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from rlx.core.engine.batches import make_batch
from rlx.core.engine.metrics import rollout_metrics
from rlx.core.engine.records import rollout_records
from rlx.core.engine.replay import check_recording
from rlx.core.errors import UsageError
from rlx.core.models import vocabulary_hash
from rlx.core.rollouts import Group
from rlx.testing.scripted import group, task


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    groups = [group(number, task(number), [0.0, 1.0]) for number in range(2)]
    (tmp_path / "rollouts").mkdir()
    write(tmp_path, groups)
    facts = {"tokenizer": vocabulary_hash(tiny_tokenizer())}
    (tmp_path / "manifest.json").write_text(json.dumps({"facts": facts}))
    return tmp_path


def write(folder: Path, groups: list[Group]) -> None:
    batch = make_batch(groups)
    batch = replace(batch, advantages=np.zeros(batch.action_count, np.float32))
    records = rollout_records(groups, batch, batch.rollout_logprobs, decode=str, limit=None)
    lines = [json.dumps(record) + "\n" for record in records]
    (folder / "rollouts" / "step-000001.jsonl").write_text("".join(lines))


def check(folder: Path, tokenizer: Any = None, **sizes: int) -> None:
    sizes = {"groups": 2, "group_size": 2, **sizes}
    check_recording(folder, tokenizer or tiny_tokenizer(), **sizes)


def test_recording_that_fits_is_taken(recording: Path) -> None:
    check(recording)
    (recording / "manifest.json").unlink()
    check(recording)


@pytest.mark.parametrize(
    ("sizes", "said"), [({"groups": 3}, "2 groups, not 3"), ({"group_size": 4}, "group, not 4")]
)
def test_other_numbers_than_were_recorded_are_refused(
    recording: Path, sizes: dict[str, int], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        check(recording, **sizes)


def test_another_tokenizer_is_refused(recording: Path) -> None:
    other = tiny_tokenizer()
    other.add_tokens(["<new>"])
    with pytest.raises(UsageError, match="another tokenizer"):
        check(recording, other)


def test_rollout_without_tokens_is_refused(recording: Path) -> None:
    path = recording / "rollouts" / "step-000001.jsonl"
    first, *rest = path.read_text().splitlines()
    record = json.loads(first)
    record["exact"] |= {"tokens": [], "spans": [], "logprobs": [], "prompt_length": 0}
    path.write_text("\n".join([json.dumps(record), *rest]) + "\n")
    with pytest.raises(UsageError, match="without tokens"):
        check(recording)


def test_an_agents_metric_does_not_take_the_place_of_rlxs_own() -> None:
    made = group(0, task(), [0.0, 1.0])
    lying = [replace(r, metrics={"reward/mean": 99.0, "own": 2.0}) for r in made.rollouts]
    found = rollout_metrics([replace(made, rollouts=lying)])
    assert found["reward/mean"] == 0.5
    assert found["own"] == 2.0
