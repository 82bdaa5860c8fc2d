"""The critic's loss is its formula, and its shares add up over micro-batches."""

from __future__ import annotations

import pytest
import torch

from rlx.core.objective import AGGREGATIONS, Denominators, MetricSums
from rlx.core.value_loss import ValueInputs, ValueSettings, value_objective

LENGTHS = [2, 0, 3, 1]
VALUES = [0.0, 1.0, 2.0, -1.0, 0.5, 3.0]
OLD = [0.0, 0.2, 2.5, -1.0, 2.0, 3.0]
RETURNS = [1.0, 1.0, 0.0, -1.0, 0.0, 2.0]
TOTAL = Denominators(tokens=6, sequences=4)


def inputs(dtype: torch.dtype = torch.float64) -> ValueInputs:
    return ValueInputs(
        lengths=torch.tensor(LENGTHS),
        values=torch.tensor(VALUES, dtype=dtype, requires_grad=True),
        old_values=torch.tensor(OLD, dtype=dtype),
        returns=torch.tensor(RETURNS, dtype=dtype),
    )


def settings(**changes: object) -> ValueSettings:
    return ValueSettings(**{"aggregation": "token-mean", "coefficient": 1.0, **changes})  # type: ignore[arg-type]


def test_unclipped_loss_is_half_the_squared_error() -> None:
    objective = value_objective(inputs(), settings=settings(clip=None), denominators=TOTAL)
    expected = [0.5 * (v - r) ** 2 for v, r in zip(VALUES, RETURNS, strict=True)]
    assert objective.per_token.tolist() == pytest.approx(expected)
    assert objective.loss.item() == pytest.approx(sum(expected) / 6)


def test_clipped_loss_is_the_larger_of_both_errors() -> None:
    """Written out token by token with ε = 0.5."""
    objective = value_objective(inputs(), settings=settings(clip=0.5), denominators=TOTAL)
    expected = []
    for value, old, target in zip(VALUES, OLD, RETURNS, strict=True):
        held = old + min(max(value - old, -0.5), 0.5)
        expected.append(0.5 * max((value - target) ** 2, (held - target) ** 2))
    assert objective.per_token.tolist() == pytest.approx(expected)


def test_value_that_moved_far_towards_its_return_learns_nothing_more() -> None:
    x = inputs()
    objective = value_objective(x, settings=settings(clip=0.5), denominators=TOTAL)
    (gradient,) = torch.autograd.grad(objective.loss, x.values)
    # Token 3 has its return without having moved; 1 and 4 moved by more than ε.
    assert [index for index in range(6) if gradient[index] == 0] == [1, 3, 4]
    assert float(objective.sums["critic/clip_rate"]) == 2


def test_coefficient_scales_loss_and_gradient() -> None:
    one, half = inputs(), inputs()
    whole = value_objective(one, settings=settings(), denominators=TOTAL)
    scaled = value_objective(half, settings=settings(coefficient=0.5), denominators=TOTAL)
    assert scaled.loss.item() == pytest.approx(0.5 * whole.loss.item())
    assert torch.allclose(
        torch.autograd.grad(scaled.loss, half.values)[0],
        0.5 * torch.autograd.grad(whole.loss, one.values)[0],
    )


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_shares_of_micro_batches_add_up(aggregation: str) -> None:
    how = settings(aggregation=aggregation, sequence_norm=5)
    whole = value_objective(inputs(), settings=how, denominators=TOTAL)
    metrics, loss = MetricSums(), 0.0
    for rollouts, tokens in (([0, 1], slice(0, 2)), ([2, 3], slice(2, 6))):
        part = ValueInputs(
            lengths=torch.tensor([LENGTHS[i] for i in rollouts]),
            values=torch.tensor(VALUES[tokens], dtype=torch.float64, requires_grad=True),
            old_values=torch.tensor(OLD[tokens], dtype=torch.float64),
            returns=torch.tensor(RETURNS[tokens], dtype=torch.float64),
        )
        share = value_objective(part, settings=how, denominators=TOTAL)
        loss += share.loss.item()
        metrics.add(share)
    assert loss == pytest.approx(whole.loss.item())
    assert metrics.metrics()["critic/loss"] == pytest.approx(whole.loss.item())


def test_half_precision_values_are_computed_in_float32() -> None:
    objective = value_objective(
        inputs(torch.bfloat16), settings=settings(clip=None), denominators=TOTAL
    )
    assert objective.loss.dtype == torch.float32
