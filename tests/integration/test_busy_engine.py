"""A real engine under 64 episodes with a slow tool is not kept waiting while work is left."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from engine_cases import CONTEXT, make_engine, make_model

from rlx.core.agents import Limits, Step, Turn, run_agent
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.collector import GroupMaker
from rlx.core.engine.inline_runtime import InlineWorker
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.engine.worker_host import WorkerHost
from rlx.core.references import Bound, ComponentRef
from rlx.testing.scripted import CharTokenizer, task

pytestmark = [pytest.mark.slow, pytest.mark.engine]

EPISODES, TURNS, TOOL = 64, 3, 1.0
RUNNING, TOKENS = 2, 64
"""Thirty-two waves of calls a turn: longer than the tool, so that waiting is never needed."""


class Watched:
    """The client, and how long nothing was asked of the engine."""

    def __init__(self, client: RolloutClient) -> None:
        self._client = client
        self._running = 0
        self._since = 0.0
        self.first = self.last = self.idle = 0.0

    @contextmanager
    def group(self, size: int) -> Iterator[Any]:
        yield self.generate

    async def generate(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        now = time.perf_counter()
        self.first = self.first or now
        if not self._running and self._since:
            self.idle += now - self._since
        self._running += 1
        try:
            return await self._client.generate(prompt, sampling, seed)
        finally:
            self._running -= 1
            self._since = self.last = time.perf_counter()


def slow_tool(turn: Turn) -> Step:
    if turn.index + 1 < TURNS:
        time.sleep(TOOL)
    return Step(observation="!?", done=turn.index + 1 == TURNS)


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_the_engine_is_idle_less_than_a_tenth_of_the_time(tmp_path: Path, kind: str) -> None:
    """About 15 s each."""
    engine = make_engine(kind, make_model(tmp_path), max_running=RUNNING)
    host = WorkerHost("engine")
    host._objects["engine"] = engine
    watched = Watched(RolloutClient(InlineWorker("engine", host)))
    maker = GroupMaker(
        client=cast(Any, watched),
        agent=Bound(
            ref=ComponentRef(kind="agents", name="slow", target="test:slow"),
            obj=slow_tool,
            params={},
        ),
        scorer=cast(Any, None),
        tokenizer=CharTokenizer(),
        sampling=Sampling(max_new_tokens=TOKENS, temperature=2.0),
        limits=Limits(context_length=CONTEXT, step_timeout=60.0),
        group_size=1,
        seed=0,
    )
    start = dataclasses.replace(task(), tokens=[40, 41, 42])

    async def whole() -> list[Any]:
        episodes = [
            maker._episode(start, i, 0, maker._sampling, watched.generate) for i in range(EPISODES)
        ]
        found = await asyncio.gather(*(run_agent(maker.agent, one) for one in episodes))
        await engine.stop()
        return list(found)

    rollouts = asyncio.run(whole())
    host.close()
    assert all(len(one.spans) == TURNS for one in rollouts)
    seconds = watched.last - watched.first
    share = watched.idle / seconds
    print(f"{kind}: idle {share:.1%} of {seconds:.1f} s")
    assert share < 0.1, f"idle {share:.0%} of {seconds:.1f} s"
