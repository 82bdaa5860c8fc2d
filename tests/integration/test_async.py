"""Generation that runs ahead of training, through the command line."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
import yaml
from whole_runs import arguments, metrics, run, start

pytestmark = [pytest.mark.engine, pytest.mark.slow]

AHEAD = "--max-staleness 1".split()
IN_FLIGHT = [*AHEAD, *"--set rollout.partial_rollout=true".split()]


def recorded(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("runtime", "engine"), [("ray", "vllm"), ("inline", "transformers")])
def test_rollouts_are_at_most_as_stale_as_allowed(workspace: Path, runtime: str, engine: str):
    run(workspace, [*arguments("out", steps=8, runtime=runtime, engine=engine), *IN_FLIGHT])
    records = recorded(workspace / "out")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert max(record["staleness/max"] for record in records) == 1
    assert all(0 <= record["rollout/engine_idle"] <= 1 for record in records)
    first = records[0]
    assert first["staleness/max"] == 0
    assert first["mismatch/logprob_abs_max"] < 1e-3
    config = yaml.safe_load((workspace / "out" / "config.yaml").read_text())
    assert config["correction"]["name"] == "tis"


def test_slow_reward_costs_little_when_generation_runs_ahead(workspace: Path):
    """2 s a reward: the learner's time and the engine's are hidden behind it."""
    (workspace / "slow.py").write_text(
        "import asyncio\n\n"
        "async def digits(sample):\n"
        "    await asyncio.sleep(2)\n"
        "    return sum(c.isdigit() for c in sample.response) / max(len(sample.response), 1)\n"
    )
    base = arguments("out", steps=6, runtime="inline", engine="transformers")
    base[base.index("mypkg:digits")] = "slow:digits"
    base += ["--set", "reward.concurrency=64"]
    rates = []
    for output, words in (("turns", []), ("ahead", AHEAD)):
        base[base.index("--output") + 1] = output
        run(workspace, [*base, *words])
        # Two steps to fill the pipeline; from then on steps come in pairs.
        seconds = sum(record["time/step"] for record in recorded(workspace / output)[2:])
        rates.append(4 * 16 / seconds)
    assert rates[1] >= 1.6 * rates[0]


def test_stopped_run_goes_on_with_the_groups_that_it_had(workspace: Path):
    words = [*arguments("out", steps=40, runtime="ray", engine="vllm"), *IN_FLIGHT]
    words += ["--checkpoint-every", "1", "--set", "checkpoint.asynchronous=true"]
    process = start(workspace, words)
    deadline = time.monotonic() + 240
    log = workspace / "out" / "metrics.jsonl"
    while not (log.exists() and len(log.read_text().splitlines()) >= 3):
        assert process.poll() is None, (workspace / "log.txt").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 128 + signal.SIGINT
    done = metrics(workspace / "out")
    assert 3 <= len(done) < 40
    words[words.index("40")] = str(len(done) + 3)
    run(workspace, [*words, "--resume"])
    records = recorded(workspace / "out")
    assert [record["step"] for record in records] == list(range(1, len(done) + 4))
    assert max(record["staleness/max"] for record in records) == 1
    groups = [
        (json.loads(line)["group"], json.loads(line)["index"])
        for path in sorted((workspace / "out" / "rollouts").glob("step-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    assert len(groups) == len(set(groups)), "a group was trained on twice"
    observed = {"engine/running_mean", "engine/kv_cache_max", "engine/prefix_hit_rate"}
    observed |= {f"memory/{what}_gib" for what in ("driver", "rollout", "learner", "object_store")}
    # A step that is filled by waiting groups may leave the engine nothing to do.
    assert observed <= set().union(*records)
    assert any("time/checkpoint_write" in record for record in records)
    trace = (workspace / "out" / "trace.json").read_text().rstrip().rstrip(",")
    events = json.loads(trace + "]")
    tracks = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert tracks == {"driver", "steps", "learner", "rewards", "engine 0"}
    steps = [one["name"] for one in events if one["name"].startswith("step ")]
    assert steps == [f"step {record['step']}" for record in records]
    said = run(workspace, ["runs", "logs", "out", "-n", "10000"])
    assert "learner-0 is made" in said
    assert said.count("rlx.driver: the run ended") == 2
