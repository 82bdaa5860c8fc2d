"""What is looked at once a step: memory by role, engines, and sources that fail."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import numpy as np
import pytest

from rlx.core.engine import monitor
from rlx.core.engine.memory import MemoryUse, memory_metrics, take_memory
from rlx.core.engine.monitor import Monitor
from rlx.core.engine.rollout.stats import EngineStats, engine_metrics
from rlx.core.engine.trace import Trace


def test_memory_of_a_role_is_that_of_its_largest_process():
    metrics = memory_metrics(
        [
            ("learner", MemoryUse(host=3.0, device=None)),
            ("learner", MemoryUse(host=4.0, device=None)),
            ("rollout", MemoryUse(host=2.0, device=70.0)),
        ]
    )
    assert metrics == {
        "memory/learner_gib": 4.0,
        "memory/rollout_gib": 70.0,
        "memory/rollout_host_gib": 2.0,
    }


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forgets a peak")
def test_the_peak_is_that_since_the_last_look():
    take_memory()
    before = take_memory().host
    block = np.ones(2**25)  # 256 MiB
    del block
    peak = take_memory().host
    after = take_memory().host
    assert peak > before + 0.2
    assert after < peak - 0.2


def test_engines_are_summed_up_over_their_steps():
    first, second = EngineStats(prefix_queries=60, prefix_hits=30, preemptions=1), EngineStats()
    first.note(running=4, waiting=2, kv_cache=0.5)
    first.note(running=2, waiting=0, kv_cache=0.25)
    second.note(running=9, waiting=0)
    assert engine_metrics([first, second, EngineStats()]) == {
        "engine/running_mean": 5.0,
        "engine/running_max": 9.0,
        "engine/waiting_max": 2.0,
        "engine/kv_cache_max": 0.5,
        "engine/prefix_hit_rate": 0.5,
        "engine/preemptions": 1.0,
    }
    assert engine_metrics([EngineStats()]) == {}


def test_a_source_that_fails_or_hangs_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(monitor, "_PATIENCE", 0.05)

    async def good() -> Mapping[str, float]:
        return {"memory/driver_gib": 1.0}

    async def broken() -> Mapping[str, float]:
        raise RuntimeError("the worker is gone")

    async def hanging() -> Mapping[str, float]:
        await asyncio.sleep(60)
        return {}

    found = asyncio.run(Monitor(Trace(None), [broken, good, hanging]).take())
    assert found == {"memory/driver_gib": 1.0}
