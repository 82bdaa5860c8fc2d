"""The journal of generation survives a kill; files of rows are complete or not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.core.config import DataConfig
from rlx.core.data import read_rows
from rlx.core.errors import UsageError
from rlx.core.journal import Journal
from rlx.core.rollouts import Group, Rollout, Span, Task
from rlx.core.rows_file import write_rows
from rlx.core.sample_totals import SampleTotals
from rlx.core.samples import SampledTask

CHAT = ({"role": "user", "content": "Grüß"},)


def rollout(task: Task, index: int, reward: float, reason: Any = "stop") -> Rollout:
    return Rollout(
        task=task,
        group_id=0,
        index=index,
        tokens=np.arange(5, dtype=np.int32),
        spans=[Span(start=2, stop=5, version=0, finish_reason=reason, reward=0.5)],
        logprobs=np.zeros(3, dtype=np.float32),
        text="dich",
        finish_reason=reason,
        reward=reward,
        parts={"right": reward},
        messages=[*CHAT, {"role": "assistant", "content": "dich"}],
    )


def sampled(number: int, *, prompt: Any = CHAT) -> SampledTask:
    task = Task(id=f"data/{number}", prompt=prompt, tokens=[1], label=number)
    rollouts = [rollout(task, 0, 1.0), rollout(task, 1, 0.0, "length")]
    return SampledTask.of(number, task, Group(id=number, task=task, rollouts=rollouts))


def test_samples_of_a_group_come_back_from_a_line() -> None:
    one = sampled(3)
    assert [sample.reward for sample in one.samples] == [1.5, 0.5]  # per-turn rewards count
    assert one.samples[0].messages == [{"role": "assistant", "content": "dich"}]
    again = SampledTask.from_json(one.to_json())
    assert again.to_json() == one.to_json()
    assert again.is_of(Task(id="data/3", prompt=CHAT, tokens=[]))
    assert not again.is_of(Task(id="data/3", prompt="Grüß", tokens=[]))
    assert not again.is_of(Task(id="data/4", prompt=CHAT, tokens=[]))
    assert sampled(0, prompt="text").samples[0].messages == []


def test_tasks_come_back_in_the_order_of_the_data(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for number in (4, 0, 2):
            journal.add(sampled(number))
        journal.add(sampled(4))
    with Journal(path) as journal:
        assert [task.number for task in journal] == [0, 2, 4]
        assert (len(journal), 2 in journal, 3 in journal) == (3, True, False)
        journal.add(sampled(3))
        assert [task.number for task in journal] == [0, 2, 3, 4]
    assert len(path.read_bytes().splitlines()) == 4


@pytest.mark.parametrize("cut", [1, 5, 200])
def test_a_line_that_a_kill_cut_off_is_done_again(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        journal.add(sampled(0))
        journal.add(sampled(1))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with Journal(path) as journal:
        assert [task.number for task in journal] == [0]
        journal.add(sampled(1))
    assert path.read_bytes() == whole


def test_two_processes_can_not_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path), pytest.raises(UsageError, match="another process"):
        Journal(path)
    with Journal(path):
        pass


def test_a_foreign_file_is_not_taken_for_a_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text('{"number": 0}\n')
    with pytest.raises(UsageError, match="did not write"):
        Journal(path)
    assert path.read_text() == '{"number": 0}\n'


def test_totals_are_over_samples_and_over_tasks(tmp_path: Path) -> None:
    empty = SampledTask.of(2, Task(id="data/2", prompt="x", tokens=[]), None)
    found = SampleTotals.of([sampled(0), sampled(1), empty])
    assert (found.tasks, found.failed, found.samples, found.tokens) == (2, 1, 4, 12)
    assert (found.reward_mean, found.best_mean, found.truncated_rate) == (1.0, 1.5, 0.5)
    assert found.parts == {"right": 0.5}
    nothing = SampleTotals.of([empty])
    assert (nothing.reward_mean, nothing.length_mean, nothing.samples) == (None, None, 0)


ROWS = [
    {"prompt": [{"role": "user", "content": "a"}], "label": None, "reward": 0.5, "parts": {}},
    {"prompt": [{"role": "user", "content": "ü"}], "label": "4", "reward": 1.0, "parts": {"x": 1}},
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_are_read_back_as_data(tmp_path: Path, ending: str) -> None:
    rows = [*ROWS[:1] * 1500, *ROWS[1:]]  # the label's type shows in the second chunk only
    path = tmp_path / f"rows.{ending}"
    assert write_rows(path, lambda: rows) == 1501
    found, _ = read_rows(DataConfig(path=str(path)))
    assert len(found) == 1501
    assert found[1500]["label"] == "4"
    assert found[1500]["prompt"] == ROWS[1]["prompt"]
    assert found[0]["reward"] == 0.5
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_no_rows_make_an_empty_file(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"rows.{ending}"
    assert write_rows(path, list) == 0
    assert path.is_file()


def test_a_failure_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("old")

    def rows() -> Iterator[dict[str, Any]]:
        yield {"a": 1}
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_rows(path, rows)
    assert path.read_text() == "old"
    assert [item.name for item in tmp_path.iterdir()] == ["rows.jsonl"]


def test_columns_that_parquet_can_not_hold_are_the_users_to_change(tmp_path: Path) -> None:
    rows = [{"label": "a"}, {"label": {"b": 1}}]
    with pytest.raises(UsageError, match="Parquet"):
        write_rows(tmp_path / "rows.parquet", lambda: rows)
    assert write_rows(tmp_path / "rows.jsonl", lambda: rows) == 2
    assert json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[1]) == rows[1]
