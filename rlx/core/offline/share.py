"""From an objective's values per token, sequence or pair to the scalar that is differentiated.

loss = Σ values / number of them in the whole optimizer step (all micro-batches, all ranks), so that
the shares of micro-batches and ranks add up to the same loss, whatever the packing.

Legend: B sequences, N trained tokens, K pairs of one micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch

from rlx.core.errors import ComponentError
from rlx.core.guards import unchanged
from rlx.core.objective import Denominators, Objective
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.offline.needs import Unit
from rlx.core.ragged import Tensor

OfflineObjective: TypeAlias = Callable[[ObjectiveInputs], "Tensor | ObjectiveOutputs"]
_AXIS = {"token": "N", "sequence": "B", "pair": "K"}


def objective_share(
    x: ObjectiveInputs,
    *,
    objective: OfflineObjective,
    per: Unit,
    denominators: Denominators,
    prefix: str = "train/",
) -> Objective:
    """One micro-batch's share of the loss, with the additive parts of its metrics.

    Args:
        denominators: of the whole step; its `sequences` are rows (a pair is one).

    Raises:
        ComponentError: the objective returned another shape than its unit's.
    """
    outputs = objective_values(x, objective, per)
    values = outputs.loss
    total = values.sum() / max(_units(per, x, denominators), 1)
    sums, counts = {}, {}
    sums[f"{prefix}loss"] = total.detach()
    # Shares of one optimizer step sum to its loss, and their counts to 1.
    rows = x.pair_count if x.has("side") else x.sequence_count
    counts[f"{prefix}loss"] = total.new_tensor(rows / max(denominators.sequences, 1))
    for key, metric in outputs.metrics.items():
        metric = metric.detach().to(values.dtype)
        metric = metric.expand(rows) if metric.ndim == 0 else metric
        sums[f"{prefix}{key}"] = metric.sum()
        counts[f"{prefix}{key}"] = total.new_tensor(float(metric.numel()))
    return Objective(
        loss=total,
        per_token=_on_tokens(values.detach(), x, per),
        sums=sums,
        counts=counts,
        maxima={},
    )


def objective_values(
    x: ObjectiveInputs, objective: OfflineObjective, per: Unit
) -> ObjectiveOutputs:
    """What the objective says, with a loss of its unit's shape.

    Raises:
        ComponentError: another shape, or an input was changed in place.
    """
    with unchanged(x, objective, "objective"):
        outputs = objective(x)
    if not isinstance(outputs, ObjectiveOutputs):
        outputs = ObjectiveOutputs(outputs)
    return ObjectiveOutputs(_checked(outputs.loss, x, per, objective), outputs.metrics)


def _units(per: Unit, x: ObjectiveInputs, denominators: Denominators) -> int:
    """Tokens, sequences or pairs of the whole step, whose `sequences` are rows."""
    if per == "token":
        return denominators.tokens
    paired = per == "sequence" and x.has("side")
    return denominators.sequences * (2 if paired else 1)


def _checked(values: object, x: ObjectiveInputs, per: Unit, objective: object) -> Tensor:
    count = {"token": x.token_count, "sequence": x.sequence_count}.get(per)
    count = x.pair_count if count is None else count
    if isinstance(values, Tensor) and values.shape == (count,):
        return values
    name = getattr(objective, "name", getattr(objective, "__name__", repr(objective)))
    got = f"shape {list(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
    raise ComponentError(
        f"The objective '{name}' returned {got}; it must return one value per {per}, "
        f"[{_AXIS[per]}] = [{count}] (the core reduces). Other units: @rlx.component(per=…)."
    )


def _on_tokens(values: Tensor, x: ObjectiveInputs, per: Unit) -> Tensor:
    """Each value on the trained tokens that it belongs to [N], so that messages can name them."""
    if per == "token":
        return values
    if per == "pair":
        both = values.new_zeros(x.sequence_count)
        index = torch.arange(x.sequence_count, device=values.device)
        both[x.chosen(index)] = values
        both[x.rejected(index)] = values
        values = both
    return x.to_tokens(values)
