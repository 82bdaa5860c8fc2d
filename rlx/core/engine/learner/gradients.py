"""From a micro-batch's log-probs to the gradient of the objective with respect to them.

The objective is differentiated on its own, on copies of the log-probs and entropies; its gradient
[n] then drives the model's backward pass. So a component never holds the model's graph, and a
value that is not finite is found before it reaches a weight, with the token that it belongs to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.errors import ComponentError, EngineError, RlxError
from rlx.core.inputs import LossInputs
from rlx.core.objective import MetricSums, Objective
from rlx.core.rollouts import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGradients:
    """Derivatives of one micro-batch's objective, and its metrics."""

    logprobs: Tensor
    """[n]."""
    entropy: Tensor
    """[n]; zeros when the entropy is not in the objective."""
    metrics: MetricSums


def no_gradients(logprobs: Tensor) -> TokenGradients:
    """For a micro-batch that adds nothing to the step."""
    zeros = torch.zeros_like(logprobs)
    return TokenGradients(logprobs=zeros, entropy=zeros, metrics=MetricSums())


def differentiate(
    compute: Callable[[LossInputs], Objective],
    inputs: LossInputs,
    batch: TrainBatch,
    micro: MicroBatch,
) -> TokenGradients:
    """Evaluate the objective on the inputs of a micro-batch and differentiate it.

    Raises:
        EngineError: the model's log-probs are not finite.
        ComponentError: the objective or its gradient is not finite, or a component failed.
    """
    where = functools.partial(_require_finite, batch=batch, micro=micro)
    where(inputs.logprobs, error=EngineError, what="the model's log-prob")
    leaves = [leaf for leaf in (inputs.logprobs, inputs.entropy) if leaf.requires_grad]
    try:
        objective = compute(inputs)
        found = torch.autograd.grad(
            objective.loss, leaves, allow_unused=True, materialize_grads=True
        )
    except RlxError:
        raise
    except Exception as error:
        raise ComponentError(f"the loss failed: {type(error).__name__}: {error}") from error
    for gradient in found:
        where(gradient, error=ComponentError, what="the loss's gradient")
    if not objective.loss.isfinite():
        raise ComponentError(f"the loss is {objective.loss.item()}, though its gradient is finite")
    return TokenGradients(
        logprobs=found[0],
        entropy=found[1] if len(found) > 1 else torch.zeros_like(found[0]),
        metrics=MetricSums(sums=objective.sums, counts=objective.counts, maxima=objective.maxima),
    )


def loss_inputs(
    batch: TrainBatch,
    micro: MicroBatch,
    logprobs: Tensor,
    entropy: Tensor,
    extra: Mapping[str, Any],
) -> LossInputs:
    """The micro-batch's part of the batch, with copies of log-probs and entropies as leaves.

    Without old log-probs in the batch the step is on policy: they are then the new ones.

    Args:
        extra: further fields of `LossInputs`, which do not depend on the micro-batch.
    """

    def pick(values: np.ndarray | None, index: np.ndarray) -> Any:
        return None if values is None else torch.from_numpy(values[index]).to(logprobs.device)

    old = pick(batch.old_logprobs, micro.actions)
    return LossInputs(
        lengths=torch.from_numpy(micro.action_lengths).to(logprobs.device),
        group=pick(batch.group, micro.sequences),
        turn=pick(batch.turn, micro.actions),
        logprobs=logprobs.detach().requires_grad_(),
        old_logprobs=logprobs.detach() if old is None else old,
        advantages=pick(batch.advantages, micro.actions),
        rollout_logprobs=pick(batch.rollout_logprobs, micro.actions),
        ref_logprobs=pick(batch.ref_logprobs, micro.actions),
        entropy=entropy.detach().requires_grad_(entropy.requires_grad),
        **extra,
    )


def _require_finite(
    values: Tensor, *, batch: TrainBatch, micro: MicroBatch, error: type[RlxError], what: str
) -> None:
    finite = values.detach().isfinite()
    if finite.all():
        return
    first = int((~finite).nonzero()[0])
    place = int(np.searchsorted(np.cumsum(micro.action_lengths), first, side="right"))
    rollout = int(micro.sequences[place])
    token = first - int(micro.action_lengths[:place].sum())
    raise error(
        f"{what} is {values[first].item()} at action token {token} (id {micro.targets[first]}) of "
        f"rollout {rollout} (group {batch.group[rollout]}), and at {int((~finite).sum()) - 1} more "
        "tokens; the weights were left as they were"
    )
