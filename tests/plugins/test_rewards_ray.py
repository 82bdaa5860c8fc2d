"""Reward workers as Ray actors: what Python can't interrupt ends a process, not the run."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rlx.core.config import FaultsConfig, RewardPolicy, RuntimeConfig
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.ray_worker import RayWorker
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.plugins import PluginSystem
from rlx.core.rollouts import Rollout, Span, Task

pytestmark = pytest.mark.engine

FUNCTIONS = r"""
import os, re

def length(sample):
    if sample.response == "endless":  # one call in C that keeps the interpreter lock
        return bool(re.match(r"(a+)+$", "a" * 60 + "b"))
    if sample.response == "deadly":
        os._exit(1)
    return len(sample.response)
"""


def group(number: int, *responses: str) -> list[Rollout]:
    task = Task(id=f"data/{number}", prompt="p", tokens=[1])
    return [
        Rollout(
            task=task,
            group_id=number,
            index=i,
            tokens=np.arange(3, dtype=np.int32),
            spans=[Span(start=1, stop=3, version=0, finish_reason="stop")],
            logprobs=np.zeros(2, np.float32),
            text=text,
            finish_reason="stop",
        )
        for i, text in enumerate(responses)
    ]


async def score_groups(folder: Path) -> tuple[list[list[Rollout] | None], dict[str, float]]:
    path = folder / "functions.py"
    path.write_text(FUNCTIONS)
    rewards = [
        (PluginSystem.load().ref("rewards", f"{path}:length"), 1.0),
        (PluginSystem.load().ref("rewards", "stop_properly"), 1.0),
    ]
    policy = RewardPolicy(timeout=1.0, failure="drop_group", workers=2)
    kwargs = {"rewards": rewards, "concurrency": 4, "timeout": policy.timeout}
    specs = [
        WorkerSpec(
            name=f"rewards-{number}",
            target="rlx.core.engine.rewards:RewardWorker",
            kwargs=kwargs,
            cpus=0.0,
        )
        for number in range(policy.workers)
    ]
    faults = FaultsConfig(heartbeat=0.5, answer_timeout=3.0)
    stacks = folder / "stacks"
    runtime = RayRuntime(
        RuntimeConfig(), logs=folder, workers=len(specs), faults=faults, stacks=stacks
    )
    await asyncio.to_thread(runtime.connect)
    running: list[RayWorker] = []

    async def start(spec: WorkerSpec) -> RayWorker:
        worker = await runtime.start(spec)
        await worker.call("start")
        return worker

    async def replace(number: int, why: str) -> RayWorker:
        await runtime.end(running[number])
        running[number] = await start(specs[number])
        return running[number]

    try:
        running.extend([await start(spec) for spec in specs])
        runner = RewardRunner(list(running), rewards, policy, replace=replace)
        groups = [
            group(0, "a", "bb"),
            group(1, "fine", "endless"),
            group(2, "ccc", "d"),
            group(3, "deadly", "e"),
            group(4, "ffff", "gg"),
        ]
        scored = list(await asyncio.gather(*(runner.score_group(g) for g in groups)))
        return scored, runner.take_metrics()
    finally:
        await runtime.close()


def test_only_groups_that_take_their_process_down_are_lost(tmp_path: Path) -> None:
    scored, metrics = asyncio.run(score_groups(tmp_path))
    rewards = [None if g is None else [rollout.reward for rollout in g] for g in scored]
    assert rewards == [[1.0, 2.0], None, [3.0, 1.0], None, [4.0, 2.0]]
    assert metrics["reward/dropped_groups"] == 2.0
    assert metrics["reward/workers_replaced"] >= 4.0
    stacks = "".join(path.read_text() for path in tmp_path.glob("stacks/*/rewards-*.txt"))
    assert "in length" in stacks, "the stacks name the reward that hangs"
