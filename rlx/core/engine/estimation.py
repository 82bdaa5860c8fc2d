"""From the rollouts of a step to what the learner trains on: scores, then advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from rlx.core.component import Bound
from rlx.core.config import RunConfig
from rlx.core.engine.advantages import compute_advantages
from rlx.core.engine.collector import Collected
from rlx.core.engine.critic import Critic, critic_metrics
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.metrics import merge
from rlx.core.engine.reward_norm import RunningNorm
from rlx.core.rollouts import TrainBatch


class Reference(Protocol):
    async def score(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs [N] under the reference's weights."""
        ...


class Estimation:
    """Runs the forward passes that the selected components require, then the estimator.

    Args:
        needs_old_logprobs: whether the learner's log-probs from before the update are required.
        reward_weights: of the reward parts, by the name that they have in `Rollout.parts`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        estimator: Bound,
        learner: LearnerGroup,
        reference: Reference | None,
        critic: Critic | None,
        needs_old_logprobs: bool,
        reward_weights: Mapping[str, float],
    ) -> None:
        self._config = config
        self._estimator = estimator
        self._learner = learner
        self._reference = reference
        self._critic = critic
        self._needs_old_logprobs = needs_old_logprobs
        self._reward_weights = reward_weights
        running = config.reward.normalize == "running"
        self.reward_norm = RunningNorm(config.reward.clip) if running else None

    async def score(self, batch: TrainBatch) -> TrainBatch:
        """Run the forward passes that the selected components require, and no other."""
        if "entropy" in self._estimator.requires:
            old, entropy = await self._learner.score(batch, entropy=True)
            batch = dataclasses.replace(batch, old_logprobs=old, entropy=entropy)
        elif self._needs_old_logprobs:
            old = await self._learner.score(batch)
            batch = dataclasses.replace(batch, old_logprobs=old)
        if self._config.algorithm.old_logprobs == "rollout":
            batch = dataclasses.replace(batch, old_logprobs=batch.rollout_logprobs)
        if self._reference is not None:
            reference = await self._reference.score(batch)
            batch = dataclasses.replace(batch, ref_logprobs=reference)
        if self._critic is not None:
            batch = await self._critic.score(batch)
        return batch

    def advantages(
        self, batch: TrainBatch, collected: Collected, *, kl_coef: float
    ) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with advantages [N], and their metrics; `kl_coef`: β in force."""
        metrics = {}
        if self.reward_norm is not None:
            batch = self.reward_norm.apply(batch)
            metrics = self.reward_norm.metrics()
        batch, found = compute_advantages(
            self._estimator,
            batch,
            collected.groups,
            self._config,
            self._reward_weights,
            kl_coef=kl_coef,
        )
        return batch, merge(metrics, found, critic_metrics(batch))
