"""Who gets which GPUs of a Ray that says it has some: no GPU is needed to ask it."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlx.core.config import PlacementConfig, RunConfig, RuntimeConfig
from rlx.core.engine import workers
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.errors import EngineError, UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.selection import select

pytestmark = [pytest.mark.engine, pytest.mark.slow]

GPUS = 6


class Eye:
    """A worker that says what it sees."""

    def visible(self) -> str | None:
        return os.environ.get("CUDA_VISIBLE_DEVICES")


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        "local",
        num_cpus=8,
        num_gpus=GPUS,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=128 * 2**20,
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}},
    )
    yield ray
    ray.shutdown()


def specs(**rollout: Any) -> list[WorkerSpec]:
    """Two learner ranks, a reference, an engine over two GPUs, rewards without a model."""
    config = RunConfig.model_validate(
        {
            "learner": {"ranks": 2},
            "kl": {"coef": 0.1},
            "rollout": {"tensor_parallel": 2, **rollout},
        }
    )
    chosen = select(config, PluginSystem.load())
    made = [
        *workers.learner_specs(config, "m", chosen, dtype="float32"),
        workers.reference_spec(config, "m", dtype="float32"),
        *workers.engine_specs(config, "m", context_length=64, dtype="float32"),
        *workers.reward_specs(config, chosen),
    ]
    return [dataclasses.replace(spec, target="test_placement:Eye", env={}) for spec in made]


def see(ray: Any, **placement: Any) -> tuple[dict[str, list[str]], float, list[WorkerSpec]]:
    """The devices that each worker sees, the GPUs that others could still have, and the specs."""

    async def look() -> Any:
        runtime = RayRuntime(
            RuntimeConfig(), logs=None, workers=1, placement=PlacementConfig(**placement)
        )
        try:
            runtime.connect()
            settled = await runtime.seat(specs())
            bare = [dataclasses.replace(spec, kwargs={}) for spec in settled]
            started = await asyncio.gather(*(runtime.start(spec) for spec in bare))
            found = {one.name: await one.call("visible") for one in started}
            return found, ray.available_resources().get("GPU", 0.0), settled
        finally:
            await runtime.close()

    found, free, settled = asyncio.run(look())
    return {name: text.split(",") if text else [] for name, text in found.items()}, free, settled


def test_every_worker_sees_the_gpus_of_its_seat_and_nobody_else_gets_them(ray: Any) -> None:
    seen, free, settled = see(ray, colocate="none")
    assert {name: len(devices) for name, devices in seen.items()} == {
        "learner-0": 1,
        "learner-1": 1,
        "reference": 1,
        "engine-0": 2,
        "rewards-0": 0,
    }
    taken = [device for devices in seen.values() for device in devices]
    assert len(set(taken)) == len(taken) == 5
    assert free == GPUS - 5
    ranks = [spec.kwargs for spec in settled if spec.role == "learner"]
    assert len({(one["master_address"], one["master_port"]) for one in ranks}) == 1

    assert "sleeps" not in settled[-2].kwargs

    seen, free, settled = see(ray, colocate="all")
    assert [spec.kwargs.get("sleeps") for spec in settled if spec.role == "rollout"] == [True]
    assert sorted(seen["engine-0"]) == sorted([*seen["learner-0"], *seen["learner-1"]])
    assert seen["reference"] == seen["learner-0"]
    assert free == GPUS - 2, "what the first run had is free again"

    seen, free, _ = see(ray, gpus=0)
    assert set(map(tuple, seen.values())) == {()}
    assert free == GPUS


def test_too_few_gpus_and_a_cluster_that_is_busy_are_told(ray: Any) -> None:
    with pytest.raises(UsageError, match="needs 5 GPUs"):
        see(ray, colocate="none", gpus=4)
    other = ray.util.placement_group([{"GPU": GPUS}])
    ray.get(other.ready())
    try:
        with pytest.raises(EngineError, match=r"no room within 0\.5 s .* 0 GPUs"):
            see(ray, colocate="all", patience=0.5)
    finally:
        ray.util.remove_placement_group(other)
