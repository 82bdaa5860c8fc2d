"""A thousand episodes with a slow tool: the engine is not kept waiting while work is left."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import pytest

from rlx.core.agents import Limits, Step, Turn, run_agent
from rlx.core.engine.collector import GroupMaker
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.references import Bound, ComponentRef
from rlx.testing.scripted import CharTokenizer, task

EPISODES, TURNS, TOOL = 1000, 3, 1.0
SLOTS, CALL = 100, 0.14
"""Ten waves of calls a turn, 1.4 s: longer than the tool, so that waiting is never needed."""


class Engine:
    """Serves `SLOTS` calls at once, each for `CALL` seconds, and knows when it served none."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(SLOTS)
        self._running = 0
        self._since = 0.0
        self.first = 0.0
        self.last = 0.0
        self.idle = 0.0

    @contextmanager
    def group(self, size: int) -> Iterator[Any]:
        yield self.generate

    async def generate(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        async with self._slots:
            now = time.perf_counter()
            self.first = self.first or now
            if not self._running and self._since:
                self.idle += now - self._since
            self._running += 1
            await asyncio.sleep(CALL)
            self._running -= 1
            self._since = self.last = time.perf_counter()
        return Generation(
            request_id=0,
            tokens=np.array([65, 0], np.int32),
            logprobs=np.zeros(2, np.float32),
            finish_reason="stop",
            version=0,
        )


def slow_tool(turn: Turn) -> Step:
    if turn.index + 1 < TURNS:
        time.sleep(TOOL)
    return Step(observation="!", done=turn.index + 1 == TURNS, reward=0.5)


async def slow_async_tool(turn: Turn) -> Step:
    if turn.index + 1 < TURNS:
        await asyncio.sleep(TOOL)
    return Step(observation="!", done=turn.index + 1 == TURNS, reward=0.5)


@pytest.mark.parametrize("step", [slow_tool, slow_async_tool])
def test_the_engine_is_idle_less_than_a_tenth_of_the_time(
    step: Callable[[Turn], Step | Awaitable[Step]],
) -> None:
    async def whole() -> tuple[Engine, list[Any]]:
        engine = Engine()
        ref = ComponentRef(kind="agents", name="slow", target="test:slow")
        maker = GroupMaker(
            client=cast(Any, engine),
            agent=Bound(ref=ref, obj=step, params={}),
            scorer=cast(Any, None),
            tokenizer=CharTokenizer(),
            sampling=Sampling(max_new_tokens=20),
            limits=Limits(context_length=400, step_timeout=60.0),
            group_size=1,
            seed=0,
        )
        episodes = [
            maker._episode(task(), i, 0, maker._sampling, engine.generate) for i in range(EPISODES)
        ]
        return engine, await asyncio.gather(*(run_agent(maker.agent, one) for one in episodes))

    engine, rollouts = asyncio.run(whole())
    assert all(len(one.spans) == TURNS for one in rollouts)
    assert all(sum(span.reward for span in one.spans) == 0.5 * TURNS for one in rollouts)
    share = engine.idle / (engine.last - engine.first)
    assert share < 0.1, f"idle {share:.0%} of {engine.last - engine.first:.1f} s"
