"""The driver alone: how many rollouts a second can it carry, and how much memory does each take?

    python -m benchmarks.controller [--tokens 512] [--sizes 100 1000 …]

Engine and rewards answer from a script at once; everything else is what a run does: episodes, the
client's coalescing, the agent, groups, the sampler and the flat arrays of the batch. Each size runs
in a process of its own, with that many rollouts in flight at the same time.

Prints a Markdown table (docs/performance.md holds one). Rollouts per second of processor time say
what a machine would do that has nothing else to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

GROUP = 8
PROMPT = 64


class ScriptedWorker:
    """A rollout engine's handle that answers every call at once with the same tokens."""

    name = "scripted"

    def __init__(self, tokens: int, vocabulary: int) -> None:
        self._tokens = np.arange(tokens, dtype=np.int32) % (vocabulary // 2) + vocabulary // 4
        self._logprobs = np.full(tokens, -0.5, np.float32)

    async def stream(self, method: str, requests: Sequence[Any]) -> AsyncIterator[list[Any]]:
        from rlx.core.engine.interfaces import Generation

        assert method == "generate"
        await asyncio.sleep(0)
        yield [
            Generation(
                request_id=request.id,
                tokens=self._tokens.copy(),
                logprobs=self._logprobs.copy(),
                finish_reason="length",
                version=0,
            )
            for request in requests
        ]


class ScriptedScorer:
    """Gives every other rollout of a group the reward 1."""

    async def score_group(self, rollouts: Sequence[Any]) -> list[Any]:
        return [replace(rollout, reward=float(i % 2)) for i, rollout in enumerate(rollouts)]

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    async def state_dict(self) -> Mapping[str, Any]:
        return {}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def measure(rollouts: int, tokens: int, tokenizer_path: str | None) -> dict[str, float]:
    """One batch of `rollouts` through the driver: rollouts per second of wall time and of processor
    time, KiB per rollout."""
    from transformers import AutoTokenizer

    import rlx
    from rlx.core.agents import Limits
    from rlx.core.engine.batches import make_batch
    from rlx.core.engine.client import RolloutClient
    from rlx.core.engine.collector import Collector, GroupMaker
    from rlx.core.engine.engines import RolloutEngines
    from rlx.core.engine.interfaces import Sampling
    from rlx.core.rollouts import Task
    from rlx.core.samplers import BoundSampler
    from rlx.embedded import MODEL_FOLDER

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path or MODEL_FOLDER)
    worker = ScriptedWorker(tokens, len(tokenizer))
    groups = rollouts // GROUP
    tasks = [
        Task(id=f"bench/{i}", prompt="prompt", tokens=list(range(1, 17)) * (PROMPT // 16))
        for i in range(groups)
    ]
    scorer = ScriptedScorer()
    maker = GroupMaker(
        client=RolloutEngines([RolloutClient(worker)]),  # type: ignore[arg-type]
        agent=rlx.resolve("agents", "single_turn"),
        scorer=scorer,
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=tokens),
        limits=Limits(context_length=PROMPT + tokens, step_timeout=300.0),  # as runs have it
        group_size=GROUP,
        seed=0,
    )
    sampler = BoundSampler(rlx.resolve("samplers", "uniform"), tasks, seed=0)
    collector = Collector(maker=maker, scorer=scorer, sampler=sampler)

    async def run() -> dict[str, float]:
        await collector.collect(1)
        before = peak_kib()
        started, worked = time.perf_counter(), time.process_time()
        batch = make_batch((await collector.collect(groups)).groups)
        seconds, work = time.perf_counter() - started, time.process_time() - worked
        assert batch.action_count == groups * GROUP * tokens
        count = groups * GROUP
        return {
            "rate": count / seconds,
            "work_rate": count / work,
            "kib": (peak_kib() - before) / count,
        }

    return asyncio.run(run())


def peak_kib() -> float:
    """Peak memory of this process (Linux counts in KiB)."""
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="action tokens per rollout")
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 1_000, 10_000, 100_000])
    parser.add_argument("--tokenizer", help="model folder; the embedded model's by default")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.tokens, arguments.tokenizer)))
        return
    print("| rollouts in flight | rollouts/s | per second of processor time | KiB per rollout |")
    print("|---|---|---|---|")
    for size in arguments.sizes:
        words = ["--one", str(size), "--tokens", str(arguments.tokens)]
        words += ["--tokenizer", arguments.tokenizer] if arguments.tokenizer else []
        command = [sys.executable, "-m", "benchmarks.controller", *words]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found = json.loads(done.stdout.splitlines()[-1])
        rates = f"{found['rate']:,.0f} | {found['work_rate']:,.0f}"
        print(f"| {size:,} | {rates} | {found['kib']:.1f} |", flush=True)


if __name__ == "__main__":
    main()
