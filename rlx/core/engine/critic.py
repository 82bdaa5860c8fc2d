"""The critic beside the policy: values before the step, and a step that trains both."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable

import numpy as np

from rlx.core.config import CriticConfig
from rlx.core.engine.interfaces import FileMarks, UpdateResult
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.errors import ComponentError, RlxError
from rlx.core.rollouts import TrainBatch


class Critic:
    """The ranks of the value model, and how its training goes together with the policy's."""

    def __init__(self, group: LearnerGroup, settings: CriticConfig) -> None:
        self._group = group
        self._settings = settings

    def has(self, worker: str) -> bool:
        """Whether a worker of that name is one of the ranks."""
        return self._group.has(worker)

    async def score(self, batch: TrainBatch) -> TrainBatch:
        """The batch with `values` [N] under the current weights."""
        return dataclasses.replace(batch, values=await self._group.score(batch))

    async def update_with(
        self, policy: LearnerGroup, batch: TrainBatch, *, step: int, kl_coef: float
    ) -> UpdateResult | None:
        """Train both on the batch, or the critic alone while it warms up.

        None when aborted in time; then neither has changed.
        """
        if batch.returns is None:
            raise ComponentError(
                "The estimator requires values but returned no returns for the critic to learn: "
                "it must return rlx.Advantages(advantages, returns=…)."
            )
        if step < self._settings.warmup_steps:
            mine = await self._group.update(batch, step=step)
            return None if mine is None else _joined(batch, mine, None)

        def train_policy() -> Awaitable[UpdateResult | None]:
            return policy.update(batch, step=step, kl_coef=kl_coef)

        def train_critic() -> Awaitable[UpdateResult | None]:
            return self._group.update(batch, step=step)

        if self._settings.placement == "apart":
            theirs, mine = await _both(train_policy(), train_critic())
        else:
            theirs, mine = await train_policy(), None
        if theirs is None and mine is None:
            return None
        # One has stepped, so the other follows: an abort came too late for the pair.
        try:
            while theirs is None:
                theirs = await train_policy()
            while mine is None:
                mine = await train_critic()
        except RlxError as error:
            error.weights_changed = True
            raise
        return _joined(batch, mine, theirs)

    async def abort(self) -> None:
        await self._group.abort()

    async def hold(self, *, copy: bool, export: bool) -> None:
        await self._group.hold(copy=copy, export=export)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        return await self._group.write_held(state, model)

    async def load(self, folder: str) -> None:
        await self._group.load(folder)


async def _both(
    first: Awaitable[UpdateResult | None], second: Awaitable[UpdateResult | None]
) -> tuple[UpdateResult | None, UpdateResult | None]:
    """Wait for both, also when one fails; what fails beside a finished one changed weights."""
    results = await asyncio.gather(first, second, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            if isinstance(result, RlxError) and any(isinstance(r, UpdateResult) for r in results):
                result.weights_changed = True
            raise result
    theirs, mine = results
    assert not isinstance(theirs, BaseException)
    assert not isinstance(mine, BaseException)
    return theirs, mine


def critic_metrics(batch: TrainBatch) -> dict[str, float]:
    """How good the values were before the step; empty without a critic.

    Explained variance is 1 − Var(returns − values) / Var(returns): 1 for perfect values, 0 for any
    constant (and where all returns are the same), negative for values worse than a constant.
    """
    if batch.values is None or batch.returns is None or not len(batch.values):
        return {}
    values, returns = batch.values.astype(np.float64), batch.returns.astype(np.float64)
    variance = returns.var()
    explained = 1 - (returns - values).var() / variance if variance > 0 else 0.0
    return {
        "critic/value_mean": float(values.mean()),
        "critic/return_mean": float(returns.mean()),
        "critic/explained_variance": float(explained),
    }


def _joined(batch: TrainBatch, critic: UpdateResult, policy: UpdateResult | None) -> UpdateResult:
    """A step's result; a policy that was not trained has no log-probs but the batch's own."""
    if policy is None:
        logprobs = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        return UpdateResult(metrics=critic.metrics, logprobs=logprobs)
    return dataclasses.replace(policy, metrics={**policy.metrics, **critic.metrics})
