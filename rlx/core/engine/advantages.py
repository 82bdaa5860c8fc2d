"""Runs the selected estimator on a batch: arrays in, per-token advantages out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlx.core.advantages import estimate
from rlx.core.component import Bound
from rlx.core.config import RunConfig
from rlx.core.inputs import EstimatorInputs
from rlx.core.rollouts import Group, TrainBatch


def compute_advantages(
    estimator: Bound, batch: TrainBatch, groups: Sequence[Group], config: RunConfig
) -> TrainBatch:
    """Return the batch with `advantages` [N] (and `returns` [N] when the estimator gives them)."""
    result = estimate(
        estimator,
        estimator_inputs(batch, groups, config),
        kl_coef=config.kl.coef,
        kl_estimator=config.kl.estimator,
        kl_in_reward=config.kl.coef > 0 and config.kl.placement == "reward",
    )
    returns = None if result.returns is None else result.returns.float().numpy()
    return dataclasses.replace(batch, advantages=result.advantages.float().numpy(), returns=returns)


def estimator_inputs(
    batch: TrainBatch, groups: Sequence[Group], config: RunConfig
) -> EstimatorInputs:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = sorted({name for rollout in rollouts for name in rollout.parts})
    parts = {
        name: torch.tensor([float(rollout.parts.get(name, 0.0)) for rollout in rollouts])
        for name in names
    }
    weights = {reward.name: reward.weight for reward in config.rewards}
    return EstimatorInputs(
        rewards=_tensor(batch.rewards),
        token_rewards=_tensor(batch.token_rewards),
        group=torch.from_numpy(batch.group),
        lengths=torch.from_numpy(batch.action_lengths),
        turn=torch.from_numpy(batch.turn),
        logprobs=_tensor(batch.old_logprobs),
        old_logprobs=_tensor(batch.old_logprobs),
        ref_logprobs=_tensor(batch.ref_logprobs),
        rollout_logprobs=_tensor(batch.rollout_logprobs),
        values=_tensor(batch.values),
        parts=parts,
        part_weights={name: weights.get(name, 1.0) for name in names},
    )


def _tensor(array: np.ndarray | None) -> Any:
    return None if array is None else torch.from_numpy(array.astype(np.float32))
