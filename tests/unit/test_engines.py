"""Several rollout engines as one: homes of groups, load, what every engine is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from loop_turns import turns

from rlx.core.engine.client import RolloutClient
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.interfaces import GenerateRequest, Generation, PublishReport, Sampling
from rlx.core.errors import EngineError

SAMPLING = Sampling(max_new_tokens=4)


class Engine:
    """Answers a request with its seed, once it may."""

    def __init__(self, *, open: bool = True) -> None:
        self.seeds: list[int] = []
        self.told: list[tuple[Any, ...]] = []
        self.go = asyncio.Event()
        if open:
            self.go.set()

    async def stream(self, method: str, requests: Sequence[GenerateRequest]) -> AsyncIterator[Any]:
        self.seeds += [request.seed for request in requests]
        await self.go.wait()
        yield [
            Generation(
                request_id=request.id,
                tokens=np.array([request.seed], np.int32),
                logprobs=np.zeros(1, np.float32),
                finish_reason="stop",
                version=0,
            )
            for request in requests
        ]

    async def call(self, method: str, *args: Any) -> Any:
        self.told.append((method, *args))
        if method == "load_weights":
            return PublishReport(version=1, seconds=0.0, checksum="same")
        return None


def engines_of(workers: Sequence[Engine]) -> RolloutEngines:
    return RolloutEngines([RolloutClient(worker) for worker in workers])  # type: ignore[arg-type]


async def play(engines: RolloutEngines, group: int, size: int, *, turns: int = 1) -> list[int]:
    """The rollouts of a group, turn after turn, with seeds that tell the group."""
    found = []
    with engines.group(size) as generate:
        for _ in range(turns):
            await asyncio.sleep(0)  # all groups are open before the first of them asks
            asked = (generate([1], SAMPLING, group) for _ in range(size))
            found += [int(answer.tokens[0]) for answer in await asyncio.gather(*asked)]
    return found


def test_groups_that_begin_together_are_spread_evenly_and_stay_whole() -> None:
    async def run() -> list[list[int]]:
        workers = [Engine() for _ in range(3)]
        engines = engines_of(workers)
        answers = await asyncio.gather(*(play(engines, g, 4, turns=2) for g in range(9)))
        assert answers == [[g] * 8 for g in range(9)]
        return [worker.seeds for worker in workers]

    by_engine = asyncio.run(run())
    assert [len(seeds) for seeds in by_engine] == [24, 24, 24]
    assert [set(seeds) for seeds in by_engine] == [{0, 3, 6}, {1, 4, 7}, {2, 5, 8}]


def test_a_group_of_another_size_counts_by_its_rollouts() -> None:
    async def run() -> list[set[int]]:
        workers = [Engine(), Engine()]
        engines = engines_of(workers)
        await asyncio.gather(*(play(engines, size, size) for size in (8, 3, 2, 1)))
        return [set(worker.seeds) for worker in workers]

    assert asyncio.run(run()) == [{8}, {3, 2, 1}]


@pytest.mark.parametrize(("running", "moves"), [(10, False), (40, True)])
def test_a_turn_leaves_its_home_only_for_a_much_emptier_engine(running: int, moves: bool) -> None:
    async def run() -> tuple[list[int], list[int]]:
        full, empty = Engine(open=False), Engine()
        engines = engines_of([full, empty])
        with engines.group(1) as at_home, engines.group(1):
            busy = [asyncio.create_task(at_home([1], SAMPLING, 0)) for _ in range(running)]
            await turns()
            late = asyncio.create_task(at_home([1], SAMPLING, 7))
            await turns()
            full.go.set()
            await asyncio.gather(*busy, late)
        return full.seeds, empty.seeds

    full, empty = asyncio.run(run())
    assert (7 in empty) == moves
    assert (7 in full) != moves


def test_a_group_that_is_given_up_leaves_no_load_behind() -> None:
    async def run() -> None:
        workers = [Engine(), Engine()]
        engines = engines_of(workers)
        for group in range(5):
            with pytest.raises(RuntimeError), engines.group(50):
                raise RuntimeError("the agent failed")
            await play(engines, group, 1)
        assert [worker.seeds for worker in workers] == [[0, 1, 2, 3, 4], []]

    asyncio.run(run())


def test_every_engine_gets_the_weights_and_is_told_to_forget_and_to_stop() -> None:
    async def run() -> None:
        workers = [Engine(), Engine()]
        engines = engines_of(workers)
        weights: Any = object()
        assert [report.checksum for report in await engines.load_weights(weights)] == ["same"] * 2
        await engines.forget()
        await engines.abort()
        await engines.stop()
        for worker in workers:
            assert worker.told == [("load_weights", weights), ("forget",), ("abort",), ("stop",)]

    asyncio.run(run())


@pytest.mark.parametrize("level", [0, 2])
def test_engines_sleep_only_where_they_share_their_gpus(level: int) -> None:
    async def run() -> list[tuple[Any, ...]]:
        worker: Any = Engine()
        await RolloutEngines([RolloutClient(worker)], sleep_level=level).sleep()
        return worker.told

    assert asyncio.run(run()) == ([("sleep", 2)] if level else [])


def test_idle_share_is_the_mean_over_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("rlx.core.engine.client.time", clock)

    async def run() -> float:
        nonlocal now
        workers = [Engine(open=False), Engine()]
        engines = engines_of(workers)
        busy = asyncio.create_task(play(engines, 0, 1))
        await turns()
        engines.take_idle_share()
        now += 1
        share = engines.take_idle_share()
        workers[0].go.set()
        await busy
        return share

    assert asyncio.run(run()) == 0.5


def test_an_engine_that_fails_fails_its_own_requests_only() -> None:
    class Broken(Engine):
        async def stream(self, method: str, requests: Sequence[Any]) -> AsyncIterator[Any]:
            raise EngineError("out of memory")
            yield

    async def run() -> list[Any]:
        engines = engines_of([Broken(), Engine()])
        return await asyncio.gather(
            *(play(engines, g, 2) for g in range(2)), return_exceptions=True
        )

    broken, whole = asyncio.run(run())
    assert isinstance(broken, EngineError)
    assert whole == [1, 1]
