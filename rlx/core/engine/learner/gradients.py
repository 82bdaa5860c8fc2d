"""From what the model says of a micro-batch's tokens to the gradient of the objective there.

The objective is differentiated on its own, on copies of the model's answers (log-probs, entropies,
values); its gradients [n] then drive the model's backward pass. So a component never holds the
model's graph, and a number that is not finite is found before it reaches a weight, with the token
that it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.errors import ComponentError, NonFiniteError, RlxError
from rlx.core.inputs import LossInputs
from rlx.core.objective import MetricSums, Objective
from rlx.core.rollouts import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenGradients:
    """Derivatives of one micro-batch's objective, and its metrics."""

    answers: tuple[Tensor, ...]
    """[n] each, with respect to each of the model's answers."""
    metrics: MetricSums = field(default_factory=MetricSums)


def no_gradients(answers: tuple[Tensor, ...]) -> TokenGradients:
    """For a micro-batch that adds nothing to the step."""
    return TokenGradients(answers=tuple(torch.zeros_like(answer) for answer in answers))


def differentiate(
    compute: Callable[[], Objective], leaves: tuple[Tensor, ...], check: FiniteCheck
) -> TokenGradients:
    """Evaluate the objective of a micro-batch and differentiate it with respect to `leaves`.

    Raises:
        NonFiniteError: the objective or its gradient is not finite.
        ComponentError: a component failed.
    """
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    try:
        objective = compute()
        found = torch.autograd.grad(
            objective.loss, wanted, allow_unused=True, materialize_grads=True
        )
    except RlxError:
        raise
    except Exception as error:
        raise ComponentError(f"the loss failed: {type(error).__name__}: {error}") from error
    check(objective.per_token, "the loss")
    for gradient in found:
        check(gradient, "the loss's gradient")
    if not objective.loss.isfinite():
        raise NonFiniteError(f"the loss is {objective.loss.item()}, though finite token by token")
    gradients = iter(found)
    return TokenGradients(
        answers=tuple(
            next(gradients) if leaf.requires_grad else torch.zeros_like(leaf) for leaf in leaves
        ),
        metrics=MetricSums(sums=objective.sums, counts=objective.counts, maxima=objective.maxima),
    )


class NamedRows(Protocol):
    """A batch that can say whose a sequence is."""

    @property
    def rollout_of(self) -> np.ndarray: ...

    def name(self, rollout: int, /) -> str: ...


@dataclass(frozen=True, slots=True)
class FiniteCheck:
    """Finds the token behind a number that is not finite."""

    batch: NamedRows
    micro: MicroBatch

    def __call__(self, values: Tensor, what: str) -> None:
        """`values`: [n]; raises `NonFiniteError` that names rollout and token."""
        finite = values.detach().isfinite()
        if finite.all():
            return
        first = int((~finite).nonzero()[0])
        more = int((~finite).sum()) - 1
        others = f", and at {more} more of the micro-batch" if more else ""
        raise NonFiniteError(
            f"{what} is {values[first].item()} at {self.place(first)}{others}",
            token=int(self.micro.actions[first]),
        )

    def place(self, action: int) -> str:
        """What messages call an action token [n] of the micro-batch."""
        ends = np.cumsum(self.micro.action_lengths)
        at = int(np.searchsorted(ends, action, side="right"))
        token = action - int(ends[at] - self.micro.action_lengths[at])
        rollout = int(self.batch.rollout_of[self.micro.sequences[at]])
        name = self.batch.name(rollout)
        return f"action token {token} (id {self.micro.targets[action]}) of {name}"


def micro_fields(
    batch: TrainBatch, micro: MicroBatch, device: torch.device, *names: str
) -> dict[str, Any]:
    """The micro-batch's lengths, groups and turns, and its part of the batch's fields `names`
    [N]; a field that the batch lacks is None."""

    def pick(values: np.ndarray | None, index: np.ndarray) -> Tensor | None:
        return None if values is None else torch.from_numpy(values[index]).to(device)

    rollouts = batch.rollout_of[micro.sequences]
    whole = None if batch.segments is None else batch.rollout_action_lengths
    return {
        "lengths": torch.from_numpy(micro.action_lengths).to(device),
        "rollout_lengths": pick(whole, rollouts),
        "group": pick(batch.group, rollouts),
        "turn": pick(batch.turn, micro.actions),
        **{name: pick(getattr(batch, name), micro.actions) for name in names},
    }


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
    names = ("old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs")
    fields = micro_fields(batch, micro, logprobs.device, *names)
    if fields["old_logprobs"] is None:
        fields["old_logprobs"] = logprobs.detach()
    return LossInputs(
        **fields,
        logprobs=logprobs.detach().requires_grad_(),
        entropy=entropy.detach().requires_grad_(entropy.requires_grad),
        **extra,
    )
