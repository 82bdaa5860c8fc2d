"""The driver's part in a publication: who is asked for what, and what comes of a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rlx.core.config import PublicationConfig, RunConfig
from rlx.core.engine.interfaces import (
    PublicationPlan,
    PublishReport,
    SentWeights,
    WeightsLink,
    WeightsUpdate,
)
from rlx.core.engine.publication import Publisher
from rlx.core.engine.workers import receivers
from rlx.core.errors import EngineError, WorkerLostError


class Learner:
    """Sends when the engines load; `error`: fails instead."""

    def __init__(self, transport: str = "auto", error: Exception | None = None) -> None:
        self.plans: list[PublicationPlan] = []
        self.calls: list[str] = []
        self.aborted = asyncio.Event()
        self.loaded = asyncio.Event()
        self._transport, self._error = transport, error

    async def offer_weights(self, plan: PublicationPlan) -> WeightsUpdate:
        self.plans.append(plan)
        link = WeightsLink(key="k", transport=self._transport, address="127.0.0.1", port=1)
        return WeightsUpdate(link=link, number=0, version=plan.version, base=plan.base)

    async def send_weights(self) -> SentWeights:
        self.calls.append("send")
        if self._error:
            raise self._error
        first = asyncio.ensure_future(self.aborted.wait())
        second = asyncio.ensure_future(self.loaded.wait())
        await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        if self.aborted.is_set():
            raise EngineError("the publication was given up")
        self.loaded.clear()
        return SentWeights(version=self.plans[-1].version, bytes=2**30, checksum="abc")

    async def abort_publication(self) -> None:
        self.aborted.set()


class Engines:
    def __init__(self, learner: Learner, **changes: Any) -> None:
        self._learner, self._changes = learner, changes
        self.error: Exception | None = None

    async def load_weights(self, update: WeightsUpdate) -> list[PublishReport]:
        self._learner.calls.append("load")
        if self.error:
            raise self.error
        self._learner.loaded.set()
        report = {"version": update.version, "seconds": 1.0, "checksum": "abc", **self._changes}
        good = PublishReport(version=update.version, seconds=1.0, checksum="abc")
        return [good, PublishReport(**report)]


def publish(learner: Learner, engines: Engines, *versions: int) -> Publisher:
    publisher = Publisher(PublicationConfig(bucket_mib=3), transport="auto", receivers=2)

    async def run() -> None:
        for version in versions:
            await publisher.publish(learner, engines, version=version)  # type: ignore[arg-type]

    asyncio.run(run())
    return publisher


def test_later_publications_build_on_the_one_before() -> None:
    learner = Learner()
    publisher = publish(learner, Engines(learner), 4, 5, 6)
    assert [(plan.version, plan.base) for plan in learner.plans] == [(4, None), (5, 4), (6, 5)]
    assert {(plan.bucket, plan.receivers) for plan in learner.plans} == {(3 * 2**20, 2)}
    assert publisher.metrics() == {
        "publish/seconds": 1.0,
        "publish/gib": 1.0,
        "publish/gib_per_s": 1.0,
    }


@pytest.mark.parametrize("change", [{"checksum": "xyz"}, {"version": 3}])
def test_an_engine_with_other_weights_is_an_error(change: dict[str, Any]) -> None:
    learner = Learner()
    with pytest.raises(EngineError, match="engine 1 has other weights"):
        publish(learner, Engines(learner, **change), 4)


def test_a_failing_engine_ends_the_sending() -> None:
    learner = Learner()
    engines = Engines(learner)
    engines.error = EngineError("the worker 'engine-1' died")
    with pytest.raises(EngineError, match=r"^the worker 'engine-1' died$"):
        publish(learner, engines, 4)
    assert learner.aborted.is_set()


def test_a_lost_learner_is_told_as_such() -> None:
    learner = Learner(error=WorkerLostError("learner-0", "died"))
    engines = Engines(learner)
    engines.error = EngineError("the other end is gone")
    with pytest.raises(WorkerLostError) as caught:
        publish(learner, engines, 4)
    assert caught.value.worker == "learner-0"
    assert caught.value.__notes__ == ["Then the engines: the other end is gone"]


def test_after_a_failure_everything_is_sent_again() -> None:
    learner = Learner()
    engines = Engines(learner)

    async def run() -> None:
        publisher = Publisher(PublicationConfig(), transport="auto", receivers=2)
        await publisher.publish(learner, engines, version=1)  # type: ignore[arg-type]
        engines.error = EngineError("no")
        with pytest.raises(EngineError):
            await publisher.publish(learner, engines, version=2)  # type: ignore[arg-type]
        engines.error = None
        learner.aborted.clear()
        await publisher.publish(learner, engines, version=2)  # type: ignore[arg-type]

    asyncio.run(run())
    assert [plan.base for plan in learner.plans] == [None, 1, None]


def test_with_ipc_the_learner_lets_go_when_the_engines_are_done() -> None:
    learner = Learner(transport="ipc")
    publish(learner, Engines(learner), 1)
    assert learner.calls == ["load", "send"]


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(changes)


def test_every_worker_of_every_engine_receives() -> None:
    rollout = {"engines": 3, "tensor_parallel": 2}
    assert receivers(config(rollout=rollout)) == 6
    assert receivers(config(rollout={**rollout, "engine": "transformers"})) == 3
