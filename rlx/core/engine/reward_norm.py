"""Running normalisation of rewards: how far a rollout's reward is from all those seen so far.

R' = clip((R − mean) / std, ±limit) over the total rewards of all batches, this one included, with
mean and variance merged by the update of Chan, Golub and LeVeque (1979).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from rlx.core.rollouts import TrainBatch

_MIN_STD = 1e-6


class RunningNorm:
    """Mean and variance of the rewards of a run; part of its checkpoints."""

    def __init__(self, limit: float | None) -> None:
        """`limit` bounds the absolute value of a normalised reward; None: no bound."""
        self._limit = limit
        self._count, self._mean, self._squares = 0, 0.0, 0.0

    @property
    def mean(self) -> float:
        return self._mean

    @property
    def std(self) -> float:
        """Unbiased; at least 1e-6."""
        return max(float(np.sqrt(self._squares / max(self._count - 1, 1))), _MIN_STD)

    def apply(self, batch: TrainBatch) -> TrainBatch:
        """Take the batch into account and return it with normalised rewards.

        Each turn's reward is scaled where it is; what the shift by the mean and the bound change of
        a rollout's total goes to its last action token.
        """
        self._add(batch.rewards)
        rewards = self._normalised(batch.rewards)
        return dataclasses.replace(
            batch,
            rewards=rewards,
            token_rewards=self._tokens(batch, rewards),
            greedy_rewards=None
            if batch.greedy_rewards is None
            else self._normalised(batch.greedy_rewards),
        )

    def metrics(self) -> dict[str, float]:
        return {"reward/running_mean": self.mean, "reward/running_std": self.std}

    def state_dict(self) -> dict[str, float]:
        return {"count": self._count, "mean": self._mean, "squares": self._squares}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self._count = int(state["count"])
        self._mean, self._squares = state["mean"], state["squares"]

    def _add(self, rewards: np.ndarray) -> None:
        if not len(rewards):
            return
        number, mean = len(rewards), float(rewards.mean())
        total = self._count + number
        gap = mean - self._mean
        self._squares += float(((rewards - mean) ** 2).sum())
        self._squares += gap**2 * self._count * number / total
        self._mean += gap * number / total
        self._count = total

    def _normalised(self, rewards: np.ndarray) -> np.ndarray:
        scaled = (rewards - self.mean) / self.std
        return scaled if self._limit is None else np.clip(scaled, -self._limit, self._limit)

    def _tokens(self, batch: TrainBatch, rewards: np.ndarray) -> np.ndarray:
        scaled = batch.token_rewards / self.std
        lengths = batch.rollout_action_lengths
        spoken = lengths > 0
        last = (np.cumsum(lengths) - 1)[spoken]
        scaled[last] += (rewards - batch.rewards / self.std)[spoken]
        return scaled
