"""When a Ray cluster is held for lost, and what that ends. The head is a script here."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable

import pytest

from rlx.core.config import FaultsConfig
from rlx.core.engine import ray_head
from rlx.core.engine.ray_head import Head, HeadSilentError, HeadWatch, NodeLostError, unless
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.watch import Patience, Watch
from rlx.core.errors import ClusterLostError

SHORT = FaultsConfig(heartbeat=0.02, answer_timeout=0.1)


class Script(Head):
    """Gives its answers in turn, the last one for ever; None: all is well."""

    def __init__(self, *answers: Exception | None) -> None:
        super().__init__("head:6379")
        self._answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def ask(self, timeout: float, *, node: str | None = None) -> None:
        if (answer := next(self._answers)) is not None:
            raise answer


async def never() -> int:
    await asyncio.sleep(60)
    return 0


def watched(head: Head, use: Callable[[HeadWatch], Awaitable[object]]) -> None:
    async def run() -> None:
        watch = HeadWatch(SHORT, where=lambda: "step 3, update")
        watch.start(head, "ab")
        try:
            async with asyncio.timeout(5):
                await use(watch)
        finally:
            watch.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HeadSilentError("slow"), "the head .* at head:6379 has not answered for 0 s"),
        (ConnectionError("refused"), r"the head .* is gone \(refused\) for 0 s"),
        (NodeLostError(), "has lost the driver's node"),
    ],
)
def test_lost_cluster_fails_whatever_waits_for_it(answer: Exception, why: str):
    def call(watch: HeadWatch) -> Awaitable[object]:
        async def report(_: str) -> str:
            return ""

        patience = Patience(every=9, answer=9, progress=9)
        calls = Watch(never, patience, report, lost=watch.lost)
        return calls.result(never(), worker="w", method="update")

    for use in (call, lambda watch: unless(watch.lost, never())):
        with pytest.raises(ClusterLostError, match=f"step 3, update: .*{why}"):
            watched(Script(None, answer), use)


def test_head_that_answers_again_in_time_is_no_loss():
    slow = HeadSilentError("slow")

    async def use(watch: HeadWatch) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await unless(watch.lost, never())

    watched(Script(slow, None), use)


def test_driver_that_ray_blocks_is_ended_when_the_cluster_is_lost(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """`ray.put` waits for ever for a stopped raylet, and the event loop with it."""
    codes: list[int] = []
    monkeypatch.setattr(ray_head, "end_now", codes.append)
    monkeypatch.setattr(ray_head, "_BLOCKED", 0.2)

    async def use(watch: HeadWatch) -> None:
        time.sleep(1.0)

    watched(Script(None, NodeLostError()), use)
    assert codes == [1]
    assert "step 3, update: the Ray cluster at head:6379 has lost" in capfd.readouterr().err


def test_reward_worker_is_not_replaced_when_the_cluster_is_lost():
    class Lost:
        async def call(self, method: str, *args: object) -> object:
            raise ClusterLostError("the head is gone")

    async def replace(number: int, why: str) -> Lost:
        raise AssertionError("nothing can be started any more")

    runner = RewardRunner([Lost()], [], FaultsConfig(), replace=replace)  # type: ignore[arg-type]
    with pytest.raises(ClusterLostError):
        asyncio.run(runner._score(0, [[]]))
