"""`check_estimator`: what every advantage estimator must hold.

Legend: B rollouts, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from rlx.core.component import Bound
from rlx.core.inputs import Advantages, EstimatorInputs
from rlx.core.ragged import Tensor
from rlx.testing.cases import (
    Batch,
    batches,
    close,
    constant_rewards,
    empty_actions,
    one_rollout_groups,
    orders,
    ordinary,
    require,
    shown,
    snapshot,
    unchanged,
)
from rlx.testing.components import (
    bind,
    check_parameters,
    check_state,
    check_travel,
    restarted,
)
from rlx.testing.inputs import estimator_inputs
from rlx.testing.violations import EXAMPLES, Checker, label_of

_OPTIONAL = {
    "values": ("values", -1.0, 1.0),
    "ref_logprobs": ("ref_logprobs", -3.0, 0.0),
    "old_logprobs": ("old_logprobs", -3.0, 0.0),
    "entropy": ("entropy", 0.0, 2.0),
}


def check_estimator(target: Any, *, examples: int = EXAMPLES, **params: Any) -> None:
    """Check the maths of an estimator; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        examples: generated batches per rule.
        params: parameters of the component.
    """
    bound = restarted(bind("estimators", target, params))
    checker = Checker(f"estimator {label_of(target)}", examples=examples)
    runs = checker.holds(
        "returns [B] or [N] numbers", ordinary(), lambda batch: _shapes(bound, batch)
    )
    if runs:
        _check_maths(checker, bound)
        _check_manners(checker, bound)
    check_parameters(checker, bound)
    checker.finish()


def _check_maths(checker: Checker, bound: Bound) -> None:
    for rule, cases in (
        ("stays finite with a group of one rollout", one_rollout_groups()),
        ("stays finite when all rewards of a group are equal", constant_rewards()),
        ("stays finite when a rollout has no action tokens", empty_actions()),
    ):
        checker.holds(rule, cases, lambda batch: _finite(bound, batch))
    shuffled = ordinary().flatmap(lambda batch: st.tuples(st.just(batch), orders(batch)))
    checker.holds(
        "does not depend on the order of the rollouts",
        shuffled,
        lambda case: _permuted(bound, *case),
    )
    checker.holds(
        "does not depend on the numbers of the groups",
        batches(),
        lambda batch: _relabelled(bound, batch),
    )


def _check_manners(checker: Checker, bound: Bound) -> None:
    checker.holds("leaves its inputs as they are", ordinary(), lambda b: _mutates(bound, b))
    checker.holds("is deterministic", ordinary(), lambda b: _deterministic(bound, b))
    checker.holds("keeps float64", ordinary(), lambda b: _dtype(bound, b))
    checker.holds("returns numbers without a gradient", ordinary(), lambda b: _detached(bound, b))
    batch = Batch(group=(0, 0, 1, 1), rewards=(0.0, 1.0, 2.0, 0.5), lengths=(2, 1, 3, 1))
    check_travel(checker, bound, batch, compute, _same)
    check_state(checker, bound, ordinary(), lambda one, b, _: compute(one, b), _same)


def inputs(bound: Bound, batch: Batch, order: Sequence[int] | None = None) -> EstimatorInputs:
    """Build what the engine would give: only the optional inputs that the component requires."""
    order = range(len(batch.group)) if order is None else order

    def rollouts(values: Sequence[Any]) -> list[Any]:
        return [values[index] for index in order]

    def tokens(values: Tensor) -> Tensor:
        return batch.permute_tokens(values, order)

    optional: dict[str, Any] = {
        "rollout_logprobs": tokens(batch.numbers("rollout_logprobs", -3.0, 0.0))
    }
    for requirement in sorted(bound.requires & set(_OPTIONAL)):
        name, low, high = _OPTIONAL[requirement]
        optional[name] = tokens(batch.numbers(name, low, high))
    if bound.tags.extra.get("greedy"):
        optional["greedy_rewards"] = rollouts(
            [0.5 + 0.25 * batch.group.index(group) for group in batch.group]
        )
    rewards = rollouts(batch.rewards)
    return estimator_inputs(
        rewards=rewards,
        group=rollouts(batch.group),
        lengths=rollouts(batch.lengths),
        turn=tokens(batch.turns()),
        parts={"first": rewards, "second": [0.5 * value * value for value in rewards]},
        **optional,
    )


def compute(bound: Bound, batch: Batch) -> list[Tensor]:
    """Return advantages (and returns) on a fresh copy of the inputs."""
    return _tensors(bound(inputs(bound, batch)))


def _tensors(answer: Any) -> list[Tensor]:
    if isinstance(answer, Advantages):
        given = [answer.advantages, answer.returns]
        return [tensor for tensor in given if tensor is not None]
    return [answer]


def _shapes(bound: Bound, batch: Batch) -> None:
    answer = bound(inputs(bound, batch))
    B, N = len(batch.group), batch.tokens
    tensors = _tensors(answer)
    for tensor in tensors:
        require(isinstance(tensor, torch.Tensor), f"returned a {type(tensor).__name__}")
    shape = tuple(tensors[0].shape)
    require(shape in ((B,), (N,)), f"returned the shape {list(shape)}; B={B}, N={N}")
    for tensor in tensors:
        require(tensor.is_floating_point(), f"returned {tensor.dtype}")
        require(tensor.isfinite().all(), f"returned {shown(tensor)}")
    if len(tensors) == 2:
        shape = tuple(tensors[1].shape)
        require(shape == (N,), f"returns have the shape {list(shape)}; N={N}")


def _finite(bound: Bound, batch: Batch) -> None:
    for tensor in compute(bound, batch):
        require(tensor.isfinite().all(), f"returned {shown(tensor)}")


def _permuted(bound: Bound, batch: Batch, order: list[int]) -> None:
    usual = compute(bound, batch)
    other = _tensors(bound(inputs(bound, batch, order)))
    for before, after in zip(usual, other, strict=True):
        expected = _reordered(before, batch, order)
        require(
            close(expected, after),
            f"rollouts in the order {order} get {shown(after)} instead of {shown(expected)}",
        )


def _reordered(values: Tensor, batch: Batch, order: list[int]) -> Tensor:
    if values.shape[0] == batch.tokens and batch.tokens != len(batch.group):
        return batch.permute_tokens(values, order)
    if values.shape[0] == len(batch.group) != batch.tokens:
        return values[order]
    # B = N: one token per rollout, both readings are the same permutation
    return values[order] if set(batch.lengths) == {1} else batch.permute_tokens(values, order)


def _relabelled(bound: Bound, batch: Batch) -> None:
    ids = {group: 7 - 3 * group for group in set(batch.group)}
    for before, after in zip(
        compute(bound, batch), compute(bound, batch.relabelled(ids)), strict=True
    ):
        numbers = [ids[group] for group in batch.group]
        require(
            close(before, after),
            f"groups numbered {numbers} get {shown(after)} instead of {shown(before)}",
        )


def _mutates(bound: Bound, batch: Batch) -> None:
    x = inputs(bound, batch)
    before = snapshot(x)
    bound(x)
    changed = unchanged(before, snapshot(x))
    require(not changed, f"changed x.{', x.'.join(changed)} in place")


def _deterministic(bound: Bound, batch: Batch) -> None:
    first, second = compute(bound, batch), compute(bound, batch)
    for before, after in zip(first, second, strict=True):
        same = torch.equal(before, after)
        require(same, f"two calls give {shown(before)} and {shown(after)}")


def _dtype(bound: Bound, batch: Batch) -> None:
    for tensor in compute(bound, batch):
        require(tensor.dtype == torch.float64, f"float64 inputs give {tensor.dtype}")


def _detached(bound: Bound, batch: Batch) -> None:
    for tensor in compute(bound, batch):
        require(not tensor.requires_grad, "the result requires a gradient: detach it")


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(close(here, there) for here, there in zip(first, second, strict=True))
