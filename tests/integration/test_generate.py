"""`rlx generate` as a whole: nothing is lost or doubled by a kill, on both runtimes and engines."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from whole_runs import descendants, left_over, run, start

pytestmark = pytest.mark.engine

HELD_REWARD = """
import asyncio
from pathlib import Path

calls = []

async def digits(sample):
    calls.append(1)
    number = len(calls)
    while number > 40 and Path("hold").exists():
        await asyncio.sleep(0.05)
    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)
"""
"""Scores forty samples, and the others once the file `hold` is gone."""


def words(output: str, *more: str, engine: str = "transformers", runtime: str = "inline"):
    text = (
        f"generate tiny --data data.jsonl --runtime {runtime} --engine {engine} -n 4 "
        f"--max-new-tokens 8 --set generate.truncated=keep --output {output}"
    )
    return [*text.split(), *more]


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def journal(folder: Path) -> list[bytes]:
    path = folder / "journal.jsonl"
    return path.read_bytes().splitlines() if path.is_file() else []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_kill_loses_no_row_and_doubles_none(workspace: Path, number: signal.Signals):
    (workspace / "held.py").write_text(HELD_REWARD)
    (workspace / "hold").touch()
    few = "--set rollout.max_running=16 --reward held:digits --select all --select best".split()
    process = start(workspace, words("out", *few))
    deadline = time.monotonic() + 60
    while len(journal(workspace / "out")) < 4:
        assert time.monotonic() < deadline, (workspace / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    children = descendants(process)
    process.send_signal(number)
    code = process.wait(30)
    assert code == (-9 if number == signal.SIGKILL else 143)
    assert left_over(children) == []
    before = journal(workspace / "out")
    assert 4 <= len(before) <= 10
    assert not (workspace / "out/samples.jsonl").exists()
    (workspace / "hold").unlink()
    text = run(workspace, [*words("out", "--resume")])
    assert "were done before" in text
    after = journal(workspace / "out")
    assert set(before) - {before[-1]} <= set(after)  # the last one may have been cut off
    assert len(after) == 40
    found = rows(workspace / "out/samples.jsonl")
    places = [(f"data/{task}", index) for task in range(40) for index in range(4)]
    assert [(row["task"], row["index"]) for row in found] == places
    assert len(rows(workspace / "out/best.jsonl")) > 0


def test_selecting_again_samples_nothing(workspace: Path):
    run(workspace, words("out", "--reward", "mypkg:digits", "--max-tasks", "10"))
    made = (workspace / "out/journal.jsonl").read_bytes()
    text = run(workspace, words("out", "--resume", "--select", "pairs", "--min-margin", "0.1"))
    assert "starting" not in text
    assert (workspace / "out/journal.jsonl").read_bytes() == made
    rewards: dict[str, list[float]] = {}
    for row in rows(workspace / "out/samples.jsonl"):
        rewards.setdefault(row["task"], []).append(row["reward"])
    found = rows(workspace / "out/pairs.jsonl")
    expected = {task for task, values in rewards.items() if max(values) - min(values) >= 0.1}
    assert {row["task"] for row in found} == expected
    for row in found:
        values = rewards[row["task"]]
        assert (row["chosen_reward"], row["rejected_reward"]) == (max(values), min(values))
    results = json.loads((workspace / "out/results.json").read_text())
    assert results["files"]["pairs.jsonl"]["rows"] == len(found)
    assert sum(results["files"]["pairs.jsonl"]["dropped"].values()) == 10 - len(found)
    # more rows of the same data are more tasks
    run(workspace, words("out", "--resume", "--max-tasks", "12"))
    assert (workspace / "out/journal.jsonl").read_bytes().startswith(made)
    assert len(journal(workspace / "out")) == 12


def test_other_data_is_not_mixed_in(workspace: Path):
    run(workspace, words("out", "--max-tasks", "3"))
    (workspace / "data.jsonl").write_text('{"prompt": "7-7=", "label": "0"}\n' * 3)
    text = run(workspace, words("out", "--resume"), code=2)
    assert "task data/0 has another prompt than its samples" in text


@pytest.mark.slow
def test_ray_vllm_and_parquet(workspace: Path):
    reward = ("--reward", "mypkg:digits", "--select", "best", "--select", "all")
    more = (*reward, "--parquet", "--keep", "2")
    run(workspace, words("out", *more, engine="vllm", runtime="ray"))
    table = pyarrow.parquet.read_table(workspace / "out/samples.parquet").to_pylist()
    counts = Counter(row["task"] for row in table)
    assert counts == {f"data/{number}": 4 for number in range(40)}
    best = pyarrow.parquet.read_table(workspace / "out/best.parquet").to_pylist()
    assert max(Counter(row["task"] for row in best).values()) <= 2
    highest = {row["task"]: 0.0 for row in table}
    for row in table:
        highest[row["task"]] = max(highest[row["task"]], row["reward"])
    assert all(any(row["reward"] == highest[row["task"]] for row in best) for row in best)
