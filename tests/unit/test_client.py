"""The rollout client: one worker call for the requests of one turn of the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from loop_turns import turns

from rlx.core.engine.client import RolloutClient
from rlx.core.engine.interfaces import (
    GenerateRequest,
    Generation,
    Sampling,
    WeightsLink,
    WeightsUpdate,
)
from rlx.core.errors import EngineError, WorkerLostError

SAMPLING = Sampling(max_new_tokens=4)


class ScriptedWorker:
    name = "engine"

    def __init__(self, *, forget: bool = False, fail: bool = False) -> None:
        self.calls: list[list[GenerateRequest]] = []
        self.forget = forget
        self.fail = fail

    async def stream(self, method: str, requests: Sequence[GenerateRequest]) -> AsyncIterator:
        self.calls.append(list(requests))
        if self.fail:
            raise EngineError("the engine is gone")
        for request in reversed(requests):
            await asyncio.sleep(0)
            if not self.forget:
                yield [answer(request)]


def answer(request: GenerateRequest) -> Generation:
    return Generation(
        request_id=request.id,
        tokens=np.array([request.seed], np.int32),
        logprobs=np.zeros(1, np.float32),
        finish_reason="stop",
        version=0,
    )


async def ask(client: RolloutClient, seeds: Sequence[int]) -> list[int]:
    replies = await asyncio.gather(*(client.generate([1], SAMPLING, seed) for seed in seeds))
    return [int(reply.tokens[0]) for reply in replies]


def test_concurrent_requests_are_one_call_in_order():
    worker = ScriptedWorker()
    assert asyncio.run(ask(RolloutClient(worker), range(50))) == list(range(50))
    assert [[request.seed for request in call] for call in worker.calls] == [list(range(50))]


def test_later_requests_are_a_call_of_their_own():
    worker = ScriptedWorker()

    async def twice() -> None:
        client = RolloutClient(worker)
        await ask(client, [1, 2])
        await ask(client, [3])

    asyncio.run(twice())
    assert [len(call) for call in worker.calls] == [2, 1]


class SlowWorker(ScriptedWorker):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.loaded_during: list[int] = []
        self.running = 0

    async def stream(self, method: str, requests: Sequence[GenerateRequest]) -> AsyncIterator:
        self.running += len(requests)
        await self.go.wait()
        self.running -= len(requests)
        yield [answer(request) for request in requests]

    async def call(self, method: str, *args: object) -> None:
        assert method == "load_weights"
        self.loaded_during.append(self.running)


@pytest.mark.parametrize("in_flight", [False, True])
def test_new_weights_wait_for_running_requests_unless_they_are_swapped_in_flight(in_flight: bool):
    async def run() -> tuple[SlowWorker, int]:
        worker = SlowWorker()
        client = RolloutClient(worker, swaps_in_flight=in_flight)
        first = asyncio.create_task(ask(client, [1, 2]))
        await turns()
        load = asyncio.create_task(client.load_weights(None))
        await turns()
        second = asyncio.create_task(ask(client, [3]))
        await turns()
        asked_meanwhile = worker.running
        worker.go.set()
        await load
        assert await first == [1, 2]
        assert await second == [3], "what was asked for meanwhile is answered afterwards"
        return worker, asked_meanwhile

    worker, asked_meanwhile = asyncio.run(run())
    assert worker.loaded_during == [2 if in_flight else 0]
    assert asked_meanwhile == (3 if in_flight else 2)


def test_idle_share_is_the_time_without_requests(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now)
    monkeypatch.setattr("rlx.core.engine.client.time", clock)

    async def run() -> tuple[float, float]:
        nonlocal now
        worker = SlowWorker()
        client = RolloutClient(worker)
        now += 5
        before = client.take_idle_share()
        now += 1
        asking = asyncio.create_task(ask(client, [1]))
        await turns()
        now += 3
        worker.go.set()
        await asking
        return before, client.take_idle_share()

    assert asyncio.run(run()) == (1, 0.25)


def test_engine_error_reaches_every_caller():
    client = RolloutClient(ScriptedWorker(fail=True))

    async def outcomes() -> list[BaseException]:
        return await asyncio.gather(
            *(client.generate([1], SAMPLING, seed) for seed in range(3)), return_exceptions=True
        )

    assert [str(error) for error in asyncio.run(outcomes())] == ["the engine is gone"] * 3


def test_unanswered_request_is_an_error():
    with pytest.raises(EngineError, match="1 requests unanswered"):
        asyncio.run(ask(RolloutClient(ScriptedWorker(forget=True)), [1]))


class MortalWorker(ScriptedWorker):
    """Dies after some answers; what it is told and asked is noted."""

    def __init__(
        self, answers: int = 1_000, *, dies_loading: bool = False, comes_late: bool = False
    ) -> None:
        super().__init__()
        self.answers = answers
        self.dies_loading = dies_loading
        self.comes_late = comes_late
        self.loaded: list[object] = []

    async def stream(self, method: str, requests: Sequence[GenerateRequest]) -> AsyncIterator:
        self.calls.append(list(requests))
        for request in requests:
            await asyncio.sleep(0)
            if not self.answers:
                raise WorkerLostError(self.name, "died during 'generate'")
            self.answers -= 1
            yield [answer(request)]

    async def call(self, method: str, *args: object) -> object:
        if method == "load_weights":
            self.loaded.append(*args)
            if self.dies_loading:
                raise WorkerLostError(self.name, "died during 'load_weights'")
            if self.comes_late:
                raise EngineError("gloo sends once")
        return "report"


def update(version: int, transport: str = "auto") -> WeightsUpdate:
    link = WeightsLink(key="a", transport=transport, address="127.0.0.1", port=1)
    return WeightsUpdate(link=link, number=version, version=version)


def replaced_by(*workers: MortalWorker) -> tuple[RolloutClient, list[MortalWorker]]:
    """A client of the first worker; the others take its place, one after the other."""
    spare = list(workers[1:])

    async def renew(lost: WorkerLostError) -> MortalWorker:
        if not spare:
            raise EngineError(f"{lost}, once too often")
        await turns(100)
        return spare.pop(0)

    return RolloutClient(workers[0], renew=renew), spare


def test_only_unanswered_requests_are_made_of_the_new_engine_with_their_own_seeds():
    dying, fresh = MortalWorker(answers=3), MortalWorker()

    async def run() -> None:
        client, _ = replaced_by(dying, fresh)
        assert await ask(client, range(10)) == list(range(10))

    asyncio.run(run())
    assert [[request.seed for request in call] for call in fresh.calls] == [list(range(3, 10))]


def test_no_new_engine_is_started_for_requests_that_were_given_up():
    dying, fresh = MortalWorker(answers=0), MortalWorker()

    async def run() -> list[MortalWorker]:
        client, spare = replaced_by(dying, fresh)
        asked = asyncio.create_task(ask(client, [1]))
        while not dying.calls:
            await asyncio.sleep(0)
        asked.cancel()
        await asyncio.sleep(0.05)
        assert spare == [fresh]
        assert await ask(client, [2]) == [2], "who asks later gets one"
        return spare

    assert asyncio.run(run()) == []


def test_new_engine_has_the_published_weights_before_it_is_asked():
    dying, fresh = MortalWorker(answers=0), MortalWorker()

    async def run() -> None:
        client, _ = replaced_by(dying, fresh)
        await client.load_weights(update(7))
        waiting = asyncio.create_task(ask(client, [1]))
        await turns(20)
        assert await ask(client, [2]) == [2], "what is asked meanwhile waits too"
        assert await waiting == [1]

    asyncio.run(run())
    assert dying.loaded == fresh.loaded == [update(7)]


def test_engine_that_dies_of_new_weights_is_replaced_by_one_that_has_them():
    dying, also_dying = MortalWorker(dies_loading=True), MortalWorker(dies_loading=True)
    fresh = MortalWorker()

    async def run() -> object:
        client, _ = replaced_by(dying, also_dying, fresh)
        return await client.load_weights(update(8))

    assert asyncio.run(run()) == "report"
    assert fresh.loaded == [update(8)]


@pytest.mark.parametrize(
    ("transport", "spare", "why"),
    [("auto", 0, "gloo sends once"), ("gloo", 1, "'gloo' keeps no weights")],
)
def test_engine_whose_weights_are_gone_is_lost_for_good(transport: str, spare: int, why: str):
    """Which ends the run or takes it back to a checkpoint, as the loss of a learner does."""

    async def run() -> list[MortalWorker]:
        client, left = replaced_by(MortalWorker(answers=0), MortalWorker(comes_late=True))
        await client.load_weights(update(7, transport))
        with pytest.raises(WorkerLostError, match=f"died during 'generate'; a new one .*{why}"):
            await ask(client, [1])
        return left

    assert len(asyncio.run(run())) == spare, "with gloo none is started in vain"


def test_callers_learn_when_no_engine_can_take_the_place():
    async def outcomes() -> list[BaseException]:
        client, _ = replaced_by(MortalWorker(answers=1), MortalWorker(answers=0))
        return await asyncio.gather(
            *(client.generate([1], SAMPLING, seed) for seed in range(3)), return_exceptions=True
        )

    first, *others = asyncio.run(outcomes())
    assert isinstance(first, Generation)
    message = "the worker 'engine' died during 'generate', once too often"
    assert [str(error) for error in others] == [message] * 2


def test_calls_that_fail_together_replace_the_engine_once():
    dying, fresh = MortalWorker(answers=0), MortalWorker()

    async def run() -> list[MortalWorker]:
        client, spare = replaced_by(dying, fresh, MortalWorker())
        first = asyncio.create_task(ask(client, [1]))
        await turns(3)
        second = asyncio.create_task(ask(client, [2]))
        assert await first == [1]
        assert await second == [2]
        return spare

    assert len(asyncio.run(run())) == 1
