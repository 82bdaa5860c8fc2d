"""Whole runs over several epochs: which tasks are played, which groups are trained on, resumed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from whole_runs import arguments, metrics, run

pytestmark = pytest.mark.engine

TASKS, GROUPS, SIZE, STEPS = 10, 4, 2, 6
REWARDS = """
from pathlib import Path

def recorded(sample):
    '''Rollouts of every third task all score the same: the dynamic sampler drops their groups.'''
    with Path("played.txt").open("a") as file:
        file.write(f"{sample.group_id} {sample.task_id}\\n")
    same = int(sample.task_id.rpartition("/")[2]) % 3 == 0
    return 1.0 if same else 0.25 + 0.5 * sample.index
"""


@pytest.fixture
def folder(workspace: Path) -> Path:
    rows = [{"prompt": f"{i}+{i}=", "label": str(2 * i)} for i in range(TASKS)]
    (workspace / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workspace / "recording.py").write_text(REWARDS)
    return workspace


def words(output: str, steps: int) -> list[str]:
    plain = arguments(output, steps=steps, runtime="inline", engine="transformers")
    plain[plain.index("mypkg:digits")] = "recording:recorded"
    plain[plain.index("--group-size") + 1] = str(SIZE)
    return [*plain, "--sampler", "dynamic", "--set", "logging.rollouts_per_step=100"]


def played(folder: Path) -> list[str]:
    """The tasks in the order of their groups, and the record is begun anew."""
    lines = sorted({(int(g), task) for g, task in map(str.split, _lines(folder / "played.txt"))})
    (folder / "played.txt").unlink()
    return [task for _, task in lines]


def trained(folder: Path) -> list[list[str]]:
    """The tasks of each step's groups."""
    steps = sorted((folder / "rollouts").glob("step-*.jsonl"))
    rows = [[json.loads(line) for line in _lines(path)] for path in steps]
    # Two groups of one task may be in a step: at the end of an epoch and at the start of the next.
    return [list({row["group"]: row["task"] for row in step}.values()) for step in rows]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


@pytest.mark.slow  # three short runs, 15 s
def test_every_epoch_plays_every_task_once_and_keeps_what_was_accepted(folder: Path) -> None:
    run(folder, words("whole", STEPS))
    tasks = played(folder)
    for start in range(0, len(tasks) - TASKS, TASKS):
        assert len(set(tasks[start : start + TASKS])) == TASKS, "an epoch has each task once"
    steps = trained(folder / "whole")
    assert [len(step) for step in steps] == [GROUPS] * STEPS
    used = Counter(task for step in steps for task in step)
    dropped = {f"data/{i}" for i in range(0, TASKS, 3)}
    assert not dropped & set(used)
    # What was accepted at the end of an epoch is trained on, in this step or the next one.
    accepted = [task for task in tasks if task not in dropped]
    assert [task for step in steps for task in step] == accepted[: GROUPS * STEPS]
    records = metrics(folder / "whole")
    assert sum(r["sampler/dropped"] for r in records) == sum(t in dropped for t in tasks)

    run(folder, words("parts", 3))
    run(folder, [*words("parts", STEPS), "--resume"])
    assert played(folder) == tasks, "none is skipped, none is played again"
    assert trained(folder / "parts") == steps
    assert metrics(folder / "parts") == records
