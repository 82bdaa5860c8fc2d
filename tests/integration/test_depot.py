"""The arrays of a batch go through Ray's object store once, whoever reads them how often."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.core.config import LearnerConfig, RuntimeConfig
from rlx.core.engine.interfaces import UpdateResult
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.object_store import ObjectStore
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.rollouts import TrainBatch

pytestmark = pytest.mark.engine
ROLLOUTS, PROMPT, NEW = 64, 1000, 500
_SMALL = 100 * 1024


class Rank:
    """Answers with what it was given."""

    def score(self, batch: TrainBatch) -> np.ndarray:
        batch.tokens[0] += 0  # the share is its own
        return batch.rollout_logprobs

    def update(self, batches: Sequence[TrainBatch], *, step: int) -> UpdateResult:
        logprobs = [batch.advantages + batch.old_logprobs for batch in batches]  # type: ignore[operator]
        return UpdateResult(metrics={}, logprobs=np.concatenate(logprobs))


def make(rng: np.random.Generator) -> TrainBatch:
    n, length = ROLLOUTS * NEW, PROMPT + NEW
    return TrainBatch(
        tokens=rng.integers(0, 1000, ROLLOUTS * length).astype(np.int32),
        lengths=np.full(ROLLOUTS, length),
        action_lengths=np.full(ROLLOUTS, NEW),
        action_positions=np.tile(np.arange(PROMPT, length), ROLLOUTS),
        turn=np.zeros(n, np.int64),
        group=np.repeat(np.arange(ROLLOUTS // 8), 8),
        rollout_logprobs=rng.normal(size=n).astype(np.float32),
        rewards=rng.normal(size=ROLLOUTS),
        token_rewards=np.zeros(n),
    )


def large_bytes(*batches: TrainBatch) -> int:
    arrays: dict[int, Any] = {
        id(array): array
        for batch in batches
        for field in dataclasses.fields(batch)
        if (array := getattr(batch, field.name)) is not None and array.nbytes > _SMALL
    }
    return sum(array.nbytes for array in arrays.values())


async def ranks(runtime: RayRuntime, count: int) -> list[Any]:
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    specs = [
        WorkerSpec(name=f"rank-{number}", target="test_depot:Rank", env=env)
        for number in range(count)
    ]
    return [await runtime.start(spec) for spec in specs]


def test_phases_and_ranks_read_what_was_written_once() -> None:
    async def use() -> None:
        runtime = RayRuntime(RuntimeConfig(), logs=None, workers=2)
        await asyncio.to_thread(runtime.connect)
        try:
            workers = await ranks(runtime, 2)
            settings = LearnerConfig(minibatch_size=16)
            policy, critic = (
                LearnerGroup(workers, settings, seed=0, depot=runtime.depot) for _ in range(2)
            )
            store = ObjectStore()
            await asyncio.to_thread(store.metrics)
            base = make(np.random.default_rng(0))
            for group in (policy, critic):
                assert (await group.score(base)).tolist() == base.rollout_logprobs.tolist()
            full = dataclasses.replace(
                base,
                old_logprobs=base.rollout_logprobs * 2,
                advantages=np.ones_like(base.rollout_logprobs),
            )
            update = await policy.update(full, step=0)
            assert update is not None
            assert update.logprobs is not None
            assert np.allclose(update.logprobs, 2 * base.rollout_logprobs + 1)
            found = await asyncio.to_thread(store.metrics)
            # Answers come back through the store as well: two scores and an update.
            answers = 3 * base.rollout_logprobs.nbytes
            written = found["memory/object_store_written_gib"] * 2**30
            assert large_bytes(base, full) <= written <= 1.1 * (large_bytes(base, full) + answers)
            held = found["memory/object_store_gib"] * 2**30
            assert held >= large_bytes(base, full)
            del base, full, update
            gc.collect()
            for _ in range(50):
                left = (await asyncio.to_thread(store.metrics))["memory/object_store_gib"] * 2**30
                if left < 0.1 * held:
                    break
                await asyncio.sleep(0.1)
            assert left < 0.1 * held, "the store forgets what the driver has forgotten"
        finally:
            await runtime.close()

    asyncio.run(use())
