"""Generation ahead of training: the bound on staleness, refill, failures, state."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.core.config import RolloutConfig
from rlx.core.engine.async_collector import AsyncCollector, staleness_metrics
from rlx.core.engine.collector import Collection, Collector
from rlx.core.errors import ComponentError, UsageError
from rlx.core.rollouts import Group, Rollout, Span, Task
from rlx.core.samplers import BoundSampler

TASKS = [Task(id=f"test/{i}", prompt="?", tokens=[1]) for i in range(1000)]


class Engine:
    """Stands in for client, agent and rewards: groups take random times."""

    def __init__(
        self, seed: int = 0, *, fail_at: int | None = None, rewards: Mapping[int, float] = {}
    ) -> None:
        self.version = 0
        self.agent = rlx.resolve("agents", "single_turn")
        self.made: list[int] = []
        self.running = self.most = 0
        self._random = random.Random(seed)
        self._fail_at = fail_at
        self._rewards = rewards

    async def make(self, task: Task, number: int, clock: Any = None) -> Group:
        version = self.version
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(self._random.choice([1, 1, 2, 5, 30])):
                await asyncio.sleep(0)
            if number == self._fail_at:
                raise ComponentError("the reward is broken")
        finally:
            self.running -= 1
        self.made.append(number)
        span = Span(start=1, stop=3, version=version, finish_reason="stop")
        rollout = Rollout(
            task=task,
            group_id=number,
            index=0,
            tokens=np.array([1, 2, 3], np.int32),
            spans=[span],
            logprobs=np.zeros(2, np.float32),
            text="",
            finish_reason="stop",
            reward=self._rewards.get(number, float(self._random.random() < 0.5)),
        )
        return Group(id=number, task=task, rollouts=[rollout])

    def take_metrics(self) -> Mapping[str, float]:
        return {}

    def take_idle_share(self) -> float:
        return 0.0

    async def state_dict(self) -> Mapping[str, Any]:
        return {}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        assert state == {}


def only_ones(group: Group) -> bool:
    return group.rewards[0] == 1


def never(group: Group) -> bool:
    return False


def tasks(sampler: Any) -> BoundSampler:
    return BoundSampler(rlx.resolve("samplers", sampler or "uniform"), TASKS, seed=0)


def collector(engine: Engine, sampler: Any = None, **settings: Any) -> AsyncCollector:
    parts: dict[str, Any] = {"maker": engine, "scorer": engine, "client": engine}
    return AsyncCollector(
        **parts,
        sampler=tasks(sampler),
        settings=RolloutConfig(**{"groups": 4, "max_staleness": 1, **settings}),
    )


async def train(
    source: Collection, engine: Engine, steps: range, wanted: int = 4
) -> list[Sequence[Group]]:
    """What the trainer does: collect, update for a while, publish."""
    batches = []
    for step in steps:
        batches.append((await source.collect(wanted)).groups)
        for _ in range(8):
            await asyncio.sleep(0)
        engine.version = step + 1
        source.advance(step + 1)
    return batches


def ages(batches: list[Sequence[Group]], start: int = 0) -> list[int]:
    return [
        step - rollout.version
        for step, groups in enumerate(batches, start)
        for group in groups
        for rollout in group.rollouts
    ]


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("sampler", [None, only_ones])
@pytest.mark.parametrize("seed", range(5))
def test_no_rollout_is_older_than_the_bound_and_none_is_lost(
    staleness: int, sampler: Any, seed: int
) -> None:
    async def run() -> tuple[Engine, list[Sequence[Group]]]:
        engine = Engine(seed)
        source = collector(engine, sampler, max_staleness=staleness)
        batches = await train(source, engine, range(30))
        await source.close()
        return engine, batches

    engine, batches = asyncio.run(run())
    trained = [group.id for groups in batches for group in groups]
    assert len(trained) == len(set(trained)) == 30 * 4
    assert max(ages(batches)) <= staleness
    assert max(ages(batches)) > 0, "generation should run ahead"
    if sampler is None:
        ahead = set(engine.made) - set(trained)
        assert len(ahead) <= (staleness + 1) * 4, "more was made than may wait"


@pytest.mark.parametrize("sampler", [None, only_ones])
@pytest.mark.parametrize("seed", range(5))
def test_with_no_staleness_the_batches_are_those_of_taking_turns(sampler: Any, seed: int) -> None:
    """The same tasks under the same numbers (which are the seeds) in the same order."""
    draw = random.Random(seed)
    rewards = {number: float(draw.random() < 0.5) for number in range(1000)}

    def run(ahead: bool) -> list[list[tuple[int, str]]]:
        engine = Engine(seed + ahead, rewards=rewards)  # they take other times
        parts: dict[str, Any] = {"maker": engine, "scorer": engine}
        source: Collection = Collector(**parts, sampler=tasks(sampler))
        if ahead:
            source = collector(engine, sampler, max_staleness=0)
        batches = asyncio.run(train(source, engine, range(20)))
        assert max(ages(batches)) == 0
        return [[(group.id, group.task.id) for group in groups] for groups in batches]

    assert run(ahead=True) == run(ahead=False)


def test_groups_in_flight_are_limited() -> None:
    async def run() -> Engine:
        engine = Engine()
        source = collector(engine, max_staleness=4, max_in_flight=3)
        await train(source, engine, range(5))
        await source.close()
        return engine

    assert asyncio.run(run()).most == 3


def test_failure_of_a_group_ends_the_next_collect() -> None:
    async def run() -> None:
        engine = Engine(fail_at=6)
        source = collector(engine)
        try:
            await train(source, engine, range(5))
        finally:
            await source.close()
            assert engine.running == 0

    with pytest.raises(ComponentError, match="the reward is broken"):
        asyncio.run(run())


def test_sampler_that_keeps_nothing_hits_the_cap() -> None:
    async def run() -> None:
        engine = Engine()
        source = collector(engine, never)
        try:
            await train(source, engine, range(1))
        finally:
            await source.close()

    with pytest.raises(UsageError, match=r"kept 0 of .* groups"):
        asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_state_keeps_what_waits_and_begins_again_what_was_under_way(seed: int) -> None:
    async def first() -> tuple[list[Sequence[Group]], dict[str, Any], list[int]]:
        engine = Engine(seed)
        source = collector(engine, max_staleness=2)
        batches = await train(source, engine, range(5))
        for _ in range(5):
            await asyncio.sleep(0)
        state = await source.state_dict()
        made = list(engine.made)
        await source.close()
        return batches, state, made

    async def second(state: dict[str, Any]) -> tuple[list[Sequence[Group]], list[int]]:
        engine = Engine(seed + 100)
        engine.version = 5
        source = collector(engine, max_staleness=2)
        await source.load_state_dict(state)
        source.advance(5)
        batches = await train(source, engine, range(5, 12))
        await source.close()
        return batches, engine.made

    before, state, made = asyncio.run(first())
    after, again = asyncio.run(second(state))
    trained = [group.id for groups in [*before, *after] for group in groups]
    assert len(trained) == len(set(trained)) == 12 * 4
    assert not set(made) & set(again), "a finished group was made once more"
    assert set(range(max(trained) + 1)) <= set(made) | set(again), "a task was passed over"
    assert max(ages(after, start=5)) <= 2


@pytest.mark.parametrize("end", ["failure", "signal", "close", "close at once"])
def test_groups_that_come_to_nothing_begin_again_in_a_resumed_run(end: str) -> None:
    """An agent or reward that fails or is ended while the learner trains, and what is cancelled."""

    class Ended(BaseException):
        """What a signal ends a blocking agent with."""

    class Breaking(Engine):
        async def make(self, task: Task, number: int, clock: Any = None) -> Group:
            if number == 6:
                for _ in range(60):
                    await asyncio.sleep(0)
            if number == 6 and end == "failure":
                raise ComponentError("the reward is broken")
            if number == 6 and end == "signal":
                raise BaseExceptionGroup("", [Ended()])
            return await super().make(task, number, clock)

    async def first() -> tuple[Sequence[Group], dict[str, Any]]:
        source = collector(Breaking())
        groups = (await source.collect(4)).groups
        if end in ("failure", "signal"):
            for _ in range(100):
                await asyncio.sleep(0)
        elif end == "close at once":
            source.advance(1)
        if end.startswith("close"):
            await source.close()
        state = await source.state_dict()
        await source.close()
        return groups, state

    async def second(state: dict[str, Any]) -> list[Sequence[Group]]:
        engine = Engine()
        engine.version = 1
        source = collector(engine)
        await source.load_state_dict(state)
        source.advance(1)
        batches = await train(source, engine, range(1, 6))
        await source.close()
        return batches

    before, state = asyncio.run(first())
    trained = [group.id for groups in [before, *asyncio.run(second(state))] for group in groups]
    assert len(trained) == len(set(trained)) == 24
    assert set(range(12)) <= set(trained), "a task was passed over"


def test_staleness_is_of_tokens() -> None:
    span = Span(start=1, stop=5, version=2, finish_reason="stop", versions=((2, 3), (4, 1)))
    rollout = Rollout(
        task=TASKS[0],
        group_id=0,
        index=0,
        tokens=np.arange(5, dtype=np.int32),
        spans=[span],
        logprobs=np.zeros(4, np.float32),
        text="",
        finish_reason="stop",
    )
    found = staleness_metrics([Group(id=0, task=TASKS[0], rollouts=[rollout])], version=4)
    assert found == {"staleness/mean": (3 * 2 + 0) / 4, "staleness/max": 2.0}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"groups": 8}, {"groups": 2}),
        ({"groups": 4}, {"groups": 16}),
        ({"groups": 4, "max_staleness": 3}, {"groups": 4, "max_staleness": 1}),
        ({"groups": 6, "max_staleness": 2}, {"groups": 4, "max_staleness": 0}),
        ({"groups": 4, "max_staleness": 0}, {"groups": 4, "max_staleness": 2}),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_run_is_resumed_with_other_numbers(
    before: dict[str, int], after: dict[str, int], seed: int
) -> None:
    def make(engine: Engine, settings: dict[str, int]) -> Collection:
        if settings.get("max_staleness") == 0:
            parts: dict[str, Any] = {"maker": engine, "scorer": engine}
            return Collector(**parts, sampler=tasks(None))
        return collector(engine, **settings)

    async def run() -> tuple[list[Sequence[Group]], list[Sequence[Group]]]:
        engine = Engine(seed)
        source = make(engine, before)
        first = await train(source, engine, range(5), before["groups"])
        state = await source.state_dict()
        await source.close()
        source = make(engine, after)
        await source.load_state_dict(state)
        source.advance(5)
        async with asyncio.timeout(10):
            second = await train(source, engine, range(5, 35), after["groups"])
        await source.close()
        return first, second

    first, second = asyncio.run(run())
    trained = [group.id for groups in (*first, *second) for group in groups]
    assert len(trained) == len(set(trained)), "a group was trained on twice"
    # What was under way at the end may lack; whatever was begun before the resume may not.
    last = max(group.id for groups in first for group in groups)
    assert set(range(last + 8)) <= set(trained), "a group was skipped"
    assert max(ages(second, 5)) <= after.get("max_staleness", 1)
