"""An engine that shares its GPU: what vLLM is told, in which order."""

from __future__ import annotations

from typing import Any

import pytest

from rlx.core.config import RolloutConfig
from rlx.core.engine.interfaces import GenerateRequest, Sampling, WeightsLink, WeightsUpdate
from rlx.core.engine.rollout.vllm_core import VllmCore
from rlx.core.engine.transfer.receiver import Received
from rlx.core.errors import EngineError

LINK = WeightsLink(key="k", transport="auto", address="a", port=1)
WEIGHTS = WeightsUpdate(link=LINK, number=0, version=3)
UPDATE = [
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "rlx_received",
]
REQUEST = GenerateRequest(id=0, prompt=[1], sampling=Sampling(max_new_tokens=1), seed=0)


class Vllm:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.engine_core = self

    def sleep(self, level: int) -> None:
        self.told.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.told.append(("wake", *tags))

    def collective_rpc(self, method: str, *, kwargs: Any) -> list[Any]:
        self.told.append(method)
        return [Received(checksum="c", waited=0.0)] if method == "rlx_received" else []

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> None:
        self.told.append("forget")


def core(*, sleeps: bool) -> tuple[VllmCore, Vllm]:
    made = VllmCore(
        model="m",
        settings=RolloutConfig(),
        context_length=8,
        dtype="float32",
        seed=0,
        threads=1,
        sleeps=sleeps,
    )
    vllm = Vllm()
    made._engine, made._vocabulary = vllm, 9
    return made, vllm


def test_weights_wake_up_before_they_are_replaced_and_the_cache_after() -> None:
    made, vllm = core(sleeps=True)
    made.sleep(2)
    made.sleep(2)
    with pytest.raises(EngineError, match="sleeps until it gets new weights"):
        made.check(REQUEST)
    assert made.load_weights(WEIGHTS).version == 3
    assert vllm.told == [
        ("sleep", 2),
        ("wake", "weights"),
        *UPDATE,
        ("wake", "kv_cache"),
        "forget",
    ]
    made.check(REQUEST)


def test_an_engine_with_a_gpu_of_its_own_stays_awake() -> None:
    made, vllm = core(sleeps=False)
    made.sleep(1)
    made.load_weights(WEIGHTS)
    made.check(REQUEST)
    assert vllm.told == [*UPDATE, "forget"]
