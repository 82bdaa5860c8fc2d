"""Runs the selected estimator on a batch: arrays in, per-token advantages out."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from rlx.core.advantages import estimate
from rlx.core.component import Bound
from rlx.core.config import RunConfig
from rlx.core.engine.metrics import advantage_metrics
from rlx.core.errors import NonFiniteError
from rlx.core.inputs import EstimatorInputs
from rlx.core.rollouts import Group, TrainBatch


def compute_advantages(
    estimator: Bound,
    batch: TrainBatch,
    groups: Sequence[Group],
    config: RunConfig,
    weights: Mapping[str, float],
    *,
    kl_coef: float,
) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with `advantages` [N] (and `returns` [N] where given), and its metrics.

    Args:
        weights: of the reward parts, by the name that they have in `Rollout.parts`.
        kl_coef: β in force.

    Raises:
        NonFiniteError: an advantage or return is not finite; under `nonfinite: skip` the learner
            finds it instead, and leaves out the optimizer steps that it is in.
    """
    try:
        result = estimate(
            estimator,
            estimator_inputs(batch, groups, weights),
            kl_coef=kl_coef,
            kl_estimator=config.kl.estimator,
            kl_in_reward=config.kl.coef > 0 and config.kl.placement == "reward",
            require_finite=config.learner.nonfinite == "raise",
        )
    except NonFiniteError as error:
        raise _located(error, batch) from error
    returns = None if result.returns is None else result.returns.float().numpy()
    filled = dataclasses.replace(
        batch, advantages=result.advantages.float().numpy(), returns=returns
    )
    return filled, {**advantage_metrics(filled), **result.metrics}


def _located(error: NonFiniteError, batch: TrainBatch) -> NonFiniteError:
    """The error with the rollout and token that it is about."""
    if error.token is None or batch.names is None:
        return error
    lengths = batch.rollout_action_lengths
    ends = np.cumsum(lengths)
    rollout = int(np.searchsorted(ends, error.token, side="right"))
    token = error.token - int(ends[rollout] - lengths[rollout])
    return NonFiniteError(
        f"{error} It is action token {token} of the rollout ({batch.names[rollout]}).",
        token=error.token,
    )


def estimator_inputs(
    batch: TrainBatch, groups: Sequence[Group], weights: Mapping[str, float]
) -> EstimatorInputs:
    """What an estimator sees of a batch; optional inputs are there when they were computed."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    names = sorted({name for rollout in rollouts for name in rollout.parts})
    optional: dict[str, np.ndarray | None] = {
        "values": batch.values,
        "logprobs": batch.old_logprobs,
        "old_logprobs": batch.old_logprobs,
        "ref_logprobs": batch.ref_logprobs,
        "entropy": batch.entropy,
        "greedy_rewards": batch.greedy_rewards,
    }
    return EstimatorInputs(
        rewards=_tensor(batch.rewards),
        token_rewards=_tensor(batch.token_rewards),
        group=torch.tensor(batch.group),
        lengths=torch.tensor(batch.rollout_action_lengths),
        turn=torch.tensor(batch.turn),
        rollout_logprobs=_tensor(batch.rollout_logprobs),
        parts={
            name: torch.tensor([float(rollout.parts.get(name, 0.0)) for rollout in rollouts])
            for name in names
        },
        part_weights={name: weights.get(name, 1.0) for name in names},
    ).replace(**{name: _tensor(array) for name, array in optional.items() if array is not None})


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))
