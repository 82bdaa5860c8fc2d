"""The critic's objective: clipped squared error of the values against the returns.

per token: ½·c·max((V − R)², (V_old + clip(V − V_old, ±ε) − R)²), reduced as the policy's loss is.
The clipped term keeps a value from gaining by a move of more than ε in one training step (the value
clipping of PPO's reference implementation; arXiv:2005.12729 studies it). Legend: B rollouts, N
action tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from rlx.core.inputs import Ragged
from rlx.core.objective import Denominators, Objective, aggregate
from rlx.core.ragged import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueSettings:
    """How values are fitted to returns."""

    aggregation: str
    """One of `objective.AGGREGATIONS`."""
    sequence_norm: int = 1
    """Constant length of `seq-mean-token-sum-norm`: `max_new_tokens`."""
    clip: float | None = 0.5
    """ε; None: no clipping."""
    coefficient: float = 0.5
    """c."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ValueInputs(Ragged):
    """One micro-batch, as the value loss sees it."""

    _per_token: ClassVar[str] = "values"

    values: Tensor
    """[N] with gradient, under the weights that are being trained."""
    old_values: Tensor
    """[N], under the weights before the training step."""
    returns: Tensor
    """[N], what the values shall become."""


def value_objective(
    x: ValueInputs, *, settings: ValueSettings, denominators: Denominators
) -> Objective:
    """One micro-batch's share of the critic's loss, with the additive parts of its metrics."""
    error = (x.values - x.returns) ** 2
    clipped = torch.zeros_like(error, dtype=torch.bool)
    if settings.clip is not None:
        moved = (x.values - x.old_values).clamp(-settings.clip, settings.clip)
        held = (x.old_values + moved - x.returns) ** 2
        clipped = held > error
        error = torch.maximum(error, held)
    per_token = 0.5 * settings.coefficient * error
    loss = aggregate(per_token, x, settings, denominators)
    tokens = loss.new_tensor(float(x.token_count))
    return Objective(
        loss=loss,
        per_token=per_token.detach(),
        sums={"critic/loss": loss.detach(), "critic/clip_rate": clipped.sum().to(loss.dtype)},
        # Shares of one optimizer step sum to its loss, and their counts to 1.
        counts={"critic/loss": tokens / max(denominators.tokens, 1), "critic/clip_rate": tokens},
        maxima={},
    )
