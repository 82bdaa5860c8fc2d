"""The simulator against the real loop: collector, engines and client, with scripted durations."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.core.config import RolloutConfig
from rlx.core.engine.async_collector import AsyncCollector, staleness_metrics
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.interfaces import GenerateRequest, Generation, PublishReport, Sampling
from rlx.core.rollouts import Group, Rollout, Span, Task
from rlx.core.samplers import BoundSampler
from rlx.core.simulation.run import Shape, simulate
from rlx.core.simulation.timings import Lengths, Timings

LENGTHS = [20, 30, 40, 60, 150]
STEP, REWARD, PUBLISH = 0.002, 0.02, 0.02
GROUPS, SIZE = 4, 4
TASKS = [Task(id=f"test/{i}", prompt="?", tokens=[1]) for i in range(400)]


class ScriptedEngine:
    """A token takes `STEP` seconds, whatever else runs."""

    def __init__(self) -> None:
        self.version = 0

    async def stream(self, method: str, requests: Sequence[GenerateRequest]) -> AsyncIterator[Any]:
        async def answer(request: GenerateRequest) -> Generation:
            version = self.version
            count = random.Random(request.seed).choice(LENGTHS)
            await asyncio.sleep(count * STEP)
            return Generation(
                request_id=request.id,
                tokens=np.zeros(count, np.int32),
                logprobs=np.zeros(count, np.float32),
                finish_reason="stop",
                version=version,
            )

        for done in asyncio.as_completed([answer(request) for request in requests]):
            yield [await done]

    async def call(self, method: str, *args: Any) -> Any:
        await asyncio.sleep(PUBLISH)
        (self.version,) = args
        return PublishReport(version=self.version, seconds=0.0, checksum="")


class Maker:
    """Groups by way of the real engines, with rewards that take `REWARD` seconds."""

    def __init__(self, engines: RolloutEngines) -> None:
        self._engines = engines
        self.agent = rlx.resolve("agents", "single_turn")

    async def make(self, task: Task, number: int) -> Group:
        with self._engines.group(SIZE) as generate:
            asked = [
                generate([1], Sampling(max_new_tokens=200), 1000 * number + index)
                for index in range(SIZE)
            ]
            answers = await asyncio.gather(*asked)
        await asyncio.sleep(REWARD)
        return Group(id=number, task=task, rollouts=[_rollout(task, number, a) for a in answers])

    def take_metrics(self) -> Mapping[str, float]:
        return {}


def _rollout(task: Task, number: int, answer: Generation) -> Rollout:
    count = len(answer.tokens)
    return Rollout(
        task=task,
        group_id=number,
        index=0,
        tokens=np.zeros(1 + count, np.int32),
        spans=[Span(start=1, stop=1 + count, version=answer.version, finish_reason="stop")],
        logprobs=np.zeros(count, np.float32),
        text="",
        finish_reason="stop",
        reward=0.0,
    )


async def real(staleness: int, update: float, engines: int, steps: int) -> tuple[float, float]:
    """Seconds of a step and mean staleness, as the trainer would see them."""
    clients = [RolloutClient(ScriptedEngine()) for _ in range(engines)]  # type: ignore[arg-type]
    together = RolloutEngines(clients)
    maker: Any = Maker(together)
    collector = AsyncCollector(
        maker=maker,
        scorer=maker,
        sampler=BoundSampler(rlx.resolve("samplers", "uniform"), TASKS, seed=0),
        client=together,
        settings=RolloutConfig(groups=GROUPS, max_staleness=staleness),
    )
    ends, ages = [], []
    for step in range(1, steps + 1):
        collected = await collector.collect(GROUPS)
        ages.append(staleness_metrics(collected.groups, step - 1)["staleness/mean"])
        await asyncio.sleep(update)
        version: Any = step
        await together.load_weights(version)
        collector.advance(step)
        ends.append(time.perf_counter())
    await collector.close()
    return (ends[-1] - ends[1]) / (len(ends) - 2), sum(ages[2:]) / len(ages[2:])


@pytest.mark.parametrize(("staleness", "update"), [(1, 0.1), (2, 0.15)])
def test_the_predicted_step_of_a_run_ahead_is_near_the_real_loop_s(
    staleness: int, update: float
) -> None:
    """About 4 s each."""
    measured, age = asyncio.run(real(staleness, update, engines=2, steps=14))
    timings = Timings(
        response_tokens=Lengths(values=LENGTHS),
        step=STEP,
        step_per_sequence=0.0,
        reward=REWARD,
        update=update,
        update_per_token=0.0,
        publish=PUBLISH,
    )
    shape = Shape(groups=GROUPS, group_size=SIZE, engines=2, ranks=1, max_staleness=staleness)
    found = simulate(timings, shape, steps=60)
    assert found.step == pytest.approx(measured, rel=0.2)
    assert found.staleness == pytest.approx(age, abs=0.35)
