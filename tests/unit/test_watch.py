"""Which calls to a worker are given up: no answer, no progress; a slow one that lives is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from rlx.core.engine.together import together
from rlx.core.engine.watch import Patience, Watch
from rlx.core.errors import ComponentError, WorkerLostError

SHORT = Patience(every=0.02, answer=0.2, progress=0.4)


def watched(
    pulse: Callable[[], Awaitable[int]], *, patience: Patience = SHORT
) -> tuple[Watch, list[str]]:
    reports: list[str] = []

    async def report(why: str) -> str:
        reports.append(why)
        await asyncio.sleep(0.01)
        return "; see stacks"

    return Watch(pulse, patience, report), reports


async def never() -> int:
    await asyncio.sleep(60)
    return 0


async def still() -> int:
    return 1


def test_worker_that_does_not_answer_is_given_up_with_all_its_calls():
    async def run() -> tuple[list[object], list[str]]:
        watch, reports = watched(never)
        calls = (watch.result(never(), worker="w", method=name) for name in ("a", "b"))
        return await asyncio.gather(*calls, return_exceptions=True), reports

    errors, reports = asyncio.run(run())
    assert [type(error) for error in errors] == [WorkerLostError] * 2
    expected = "the worker 'w' hangs in 'a': it has not answered for 0 s; see stacks"
    assert str(errors[0]) == expected
    assert errors[0].hung
    assert len(reports) == 1


def test_worker_that_answers_without_getting_on_is_given_up():
    async def run() -> float:
        watch, _ = watched(still)
        started = time.monotonic()
        with pytest.raises(WorkerLostError, match="it lives, but has not got on for"):
            await watch.result(never(), worker="w", method="update")
        return time.monotonic() - started

    assert 0.4 <= asyncio.run(run()) < 2


def test_slow_call_of_a_worker_that_gets_on_is_waited_for():
    async def run() -> str:
        begun = time.monotonic()

        async def growing() -> int:
            return int((time.monotonic() - begun) * 20)

        async def slow() -> str:
            await asyncio.sleep(1.2)
            return "done"

        watch, reports = watched(growing)
        assert await watch.result(slow(), worker="w", method="update") == "done"
        assert reports == []
        return "ok"

    assert asyncio.run(run()) == "ok"


@pytest.mark.parametrize("pulse", [still, never])
def test_start_has_a_time_out_of_its_own(pulse: Callable[[], Awaitable[int]]):
    async def run() -> None:
        watch, reports = watched(pulse)
        await watch.result(asyncio.sleep(1.0), worker="w", method="start")
        assert reports == []

    asyncio.run(run())


def test_finished_calls_are_progress():
    async def run() -> None:
        watch, reports = watched(still)
        long = asyncio.create_task(watch.result(asyncio.sleep(1.0), worker="w", method="long"))
        for _ in range(8):
            await watch.result(asyncio.sleep(0.1), worker="w", method="short")
        await long
        assert reports == []

    asyncio.run(run())


def test_time_in_which_the_driver_itself_stood_still_blames_nobody():
    async def run() -> None:
        watch, reports = watched(still)
        call = asyncio.create_task(watch.result(asyncio.sleep(0.9), worker="w", method="m"))
        await asyncio.sleep(0.1)
        time.sleep(0.7)  # the event loop is blocked, a suspended machine looks the same
        await call
        assert reports == []

    asyncio.run(run())


def test_death_that_a_call_tells_is_not_a_hang():
    async def dead() -> int:
        raise RuntimeError("the actor died")

    async def fails() -> None:
        await asyncio.sleep(0.3)
        raise ComponentError("it died")

    async def run() -> None:
        watch, reports = watched(dead)
        with pytest.raises(ComponentError, match="it died"):
            await watch.result(fails(), worker="w", method="m")
        assert reports == []

    asyncio.run(run())


def test_loss_of_a_rank_is_told_before_what_its_peers_say_of_it():
    async def peer() -> None:
        raise RuntimeError("Connection closed by peer")

    async def lost() -> None:
        await asyncio.sleep(0.1)
        raise WorkerLostError("learner-1", "died during 'update'")

    with pytest.raises(WorkerLostError, match="learner-1"):
        asyncio.run(together([peer(), lost()]))


def test_error_of_a_component_is_told_at_once():
    async def broken() -> None:
        raise ComponentError("loss")

    started = time.monotonic()
    with pytest.raises(ComponentError, match="loss"):
        asyncio.run(together([never(), broken()]))
    assert time.monotonic() - started < 2
