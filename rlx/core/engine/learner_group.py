"""All ranks of a learner as one: shares the batch out, joins the answers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.core.config import LearnerConfig
from rlx.core.engine.batches import take
from rlx.core.engine.depot import Depot, LocalDepot
from rlx.core.engine.interfaces import (
    FileMarks,
    PublicationPlan,
    SentWeights,
    UpdateResult,
    WeightsUpdate,
)
from rlx.core.engine.runtime import Worker
from rlx.core.engine.shares import batch_shares
from rlx.core.engine.together import together
from rlx.core.flat import ragged_indices
from rlx.core.rollouts import TrainBatch


class LearnerGroup:
    """The data-parallel ranks of one model, or the replicas of a scorer."""

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: LearnerConfig,
        seed: int,
        *,
        depot: Depot | None = None,
    ) -> None:
        """`depot`: how batches get to the workers; unset: they are in this process."""
        self._workers = list(workers)
        self._settings = settings
        self._seed = seed
        self._depot = depot or LocalDepot()
        self._shared_prefix = False

    def has(self, worker: str) -> bool:
        """Whether a worker of that name is one of the ranks."""
        return any(one.name == worker for one in self._workers)

    async def start(self) -> Mapping[str, Any]:
        facts: Mapping[str, Any] = (await self._all("start"))[0]
        self._shared_prefix = bool(facts.get("shared_prefix"))
        return facts

    async def score(self, batch: TrainBatch, **options: bool) -> np.ndarray:
        """Log-probs (a critic's values) [N] under the current weights.

        Args:
            options: what else the learner's `score` takes (`entropy`, the policy's).
        """
        shares = self._shares(batch)
        parts = await together(
            worker.call("score", self._depot.part(batch, share), **options)
            for worker, share in zip(self._workers, shares, strict=True)
        )
        return _join(batch, shares, parts)

    async def update(
        self, batch: TrainBatch, *, step: int, **options: float
    ) -> UpdateResult | None:
        """Train on the batch: epochs × minibatches optimizer steps; None when aborted in time.

        Args:
            options: what else the learner's `update` takes (`kl_coef`, the policy's).
        """
        plan = self._plan(batch, step)
        results = await together(
            worker.call("update", self._parts(batch, plan, rank), step=step, **options)
            for rank, worker in enumerate(self._workers)
        )
        if any(result is None for result in results):
            return None
        if results[0].logprobs is None:
            return results[0]
        first_epoch = plan[: len(plan) // self._settings.epochs]
        shares = [
            np.concatenate([minibatch[rank] for minibatch in first_epoch])
            for rank in range(len(self._workers))
        ]
        logprobs = _join(batch, shares, [result.logprobs for result in results])
        return dataclasses.replace(results[0], logprobs=logprobs)

    def _plan(self, batch: TrainBatch, step: int) -> list[list[np.ndarray]]:
        """For each optimizer step the rollouts of each rank."""
        count = batch.rollout_count
        size = self._settings.minibatch_size or count
        plan = []
        for epoch in range(self._settings.epochs):
            order = np.arange(count)
            if size < count:
                order = np.random.default_rng([self._seed, step, epoch]).permutation(count)
            for start in range(0, count, size):
                chosen = order[start : start + size]
                shares = self._shares(batch if size >= count else take(batch, chosen))
                plan.append([chosen[share] for share in shares])
        return plan

    def _parts(
        self, batch: TrainBatch, plan: Sequence[Sequence[np.ndarray]], rank: int
    ) -> list[Any]:
        return [self._depot.part(batch, shares[rank]) for shares in plan]

    def _shares(self, batch: TrainBatch) -> list[np.ndarray]:
        return batch_shares(batch, len(self._workers), shared_prefix=self._shared_prefix)

    async def abort(self) -> None:
        await asyncio.gather(*(worker.now("abort") for worker in self._workers))

    async def offer_weights(self, plan: PublicationPlan) -> WeightsUpdate:
        return (await self._all("offer_weights", plan))[0]

    async def send_weights(self) -> SentWeights:
        return (await self._all("send_weights"))[0]

    async def abort_publication(self) -> None:
        await asyncio.gather(*(worker.now("abort_publication") for worker in self._workers))

    async def hold(self, *, copy: bool, export: bool) -> None:
        """All ranks take hold of their state in memory."""
        await self._all("hold", copy=copy, export=export)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        """All ranks write what they hold, into the folders `state` and `model`."""
        parts = await self._all("write_held", state, model)
        return {name: mark for part in parts for name, mark in part.items()}

    async def load(self, folder: str) -> None:
        await self._all("load", folder)

    async def export(self, folder: str, *, adapter: bool = False) -> None:
        await self._all("export", folder, adapter=adapter)

    async def stop(self) -> None:
        await self._all("stop")

    async def _all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        return await together(worker.call(method, *args, **options) for worker in self._workers)


class StartingWeights:
    """The reference that a policy with adapters is itself, with them switched off."""

    def __init__(self, policy: LearnerGroup) -> None:
        self._policy = policy

    async def score(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs [N] under the weights that the policy started from."""
        return await self._policy.score(batch, as_it_started=True)


def _join(
    batch: TrainBatch, shares: Sequence[np.ndarray], parts: Sequence[np.ndarray]
) -> np.ndarray:
    """Put per-token answers […, n] of the shares back into the batch's order."""
    joined = np.zeros((*parts[0].shape[:-1], batch.action_count), np.float32)
    lengths = batch.rollout_action_lengths
    for share, part in zip(shares, parts, strict=True):
        joined[..., ragged_indices(lengths, share)] = part
    return joined
