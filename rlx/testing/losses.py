"""`check_loss`: what every policy loss must hold.

Legend: B rollouts, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from rlx.core.component import Bound
from rlx.core.inputs import LossInputs, LossOutputs
from rlx.core.ragged import Tensor
from rlx.testing.cases import (
    Batch,
    close,
    empty_actions,
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
    keeps_state,
    restarted,
)
from rlx.testing.inputs import loss_inputs
from rlx.testing.violations import EXAMPLES, Checker, label_of

_GAPS = (0.0, 50.0, -50.0, 1000.0, -1000.0)
"""Log-ratios far beyond what exp() can take."""


def check_loss(target: Any, *, examples: int = EXAMPLES, **params: Any) -> None:
    """Check the maths of a policy loss; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        examples: generated batches per rule.
        params: parameters of the component.
    """
    bound = restarted(bind("losses", target, params))
    checker = Checker(f"loss {label_of(target)}", examples=examples)
    runs = checker.holds(
        "returns [N] numbers", ordinary(), lambda batch: _shape(bound, loss_batch(bound, batch))
    )
    if runs and checker.holds("has a gradient", ordinary(), lambda b: _differentiable(bound, b)):
        _check_maths(checker, bound)
        _check_manners(checker, bound)
    check_parameters(checker, bound)
    checker.finish()


def _check_maths(checker: Checker, bound: Bound) -> None:
    checker.holds(
        "raises the probability of tokens with a positive advantage, lowers it with a negative one",
        ordinary(),
        lambda batch: _direction(bound, batch),
    )
    gaps = st.tuples(ordinary(), st.lists(st.sampled_from(_GAPS), min_size=3, max_size=3))
    checker.holds(
        "stays finite at extreme log-ratios, value and gradient",
        gaps,
        lambda case: _extreme(bound, *case),
    )
    checker.holds(
        "stays finite when a rollout has no action tokens",
        empty_actions(),
        lambda batch: _finite(bound, loss_batch(bound, batch)),
    )
    shuffled = ordinary().flatmap(lambda batch: st.tuples(st.just(batch), orders(batch)))
    checker.holds(
        "does not depend on the order of the rollouts",
        shuffled,
        lambda case: _permuted(bound, *case),
    )
    checker.holds(
        "has the same gradient in one micro-batch and in several",
        ordinary().filter(lambda batch: len(batch.group) > 1),
        lambda batch: _split(bound, batch),
    )


def _check_manners(checker: Checker, bound: Bound) -> None:
    checker.holds("leaves its inputs as they are", ordinary(), lambda b: _mutates(bound, b))
    checker.holds("is deterministic", ordinary(), lambda b: _deterministic(bound, b))
    checker.holds("keeps float64", ordinary(), lambda b: _dtype(bound, b))
    batch = Batch(group=(0, 0, 1, 1), rewards=(0.0, 1.0, 2.0, 0.5), lengths=(2, 1, 3, 1))
    check_travel(checker, bound, batch, value_and_gradient, _same)
    check_state(checker, bound, ordinary(), _in_step, _same)
    if keeps_state(bound):
        checker.holds(
            "counts a step once, in however many micro-batches it comes",
            ordinary().filter(lambda batch: len(batch.group) > 1),
            lambda batch: _counts_once(bound, batch),
        )


def loss_batch(
    bound: Bound,
    batch: Batch,
    rollouts: Sequence[int] | None = None,
    *,
    on_policy: bool = False,
    gaps: Sequence[float] | None = None,
    step: int = 0,
) -> LossInputs:
    """Build a micro-batch of some of the batch's rollouts, all of them unless said otherwise.

    Args:
        on_policy: `old_logprobs` equal `logprobs`.
        gaps: log-ratios that take turns over the tokens.
        step: number of the training step, in `metadata` as the engine has it.
    """
    rollouts = range(len(batch.group)) if rollouts is None else rollouts
    logprobs = batch.numbers("logprobs", -3.0, -0.5)
    change = batch.numbers("change", -0.3, 0.3)
    if on_policy:
        change = torch.zeros_like(change)
    elif gaps is not None:
        change = torch.tensor([gaps[t % len(gaps)] for t in range(batch.tokens)]).double()
    # no advantage is 0: each token has a direction
    advantages = torch.repeat_interleave(
        torch.tensor(batch.rewards, dtype=torch.float64) - 0.4, torch.tensor(batch.lengths)
    )
    whole = {"old_logprobs": logprobs - change, "advantages": advantages}
    whole["rollout_logprobs"] = whole["old_logprobs"] + batch.numbers("noise", -0.01, 0.01)
    if "ref_logprobs" in bound.requires:
        whole["ref_logprobs"] = batch.numbers("ref_logprobs", -3.0, -0.5)
    if "entropy" in bound.requires:
        whole["entropy"] = batch.numbers("entropy", 0.1, 2.0)
    chosen: dict[str, Any] = {
        name: batch.permute_tokens(values, rollouts) for name, values in whole.items()
    }
    everything = len(rollouts) == len(batch.group)
    step_order = rollouts if everything else range(len(batch.group))
    if "old_logprobs" in bound.requires:
        chosen["step_old_logprobs"] = batch.permute_tokens(whole["old_logprobs"], step_order)
    return loss_inputs(
        logprobs=batch.permute_tokens(logprobs, rollouts).requires_grad_(),
        lengths=[batch.lengths[index] for index in rollouts],
        group=[batch.group[index] for index in rollouts],
        turn=batch.permute_tokens(batch.turns(), rollouts),
        step_advantages=batch.permute_tokens(whole["advantages"], step_order),
        metadata={"step": step},
        **chosen,
    )


def evaluate(bound: Bound, x: LossInputs) -> tuple[Tensor, Tensor]:
    """Return the surrogate [N] and the gradient [N] of its sum."""
    values = _per_token(bound(x))
    (gradient,) = torch.autograd.grad(values.sum(), x.logprobs)
    return values.detach(), gradient


def value_and_gradient(bound: Bound, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return surrogate and gradient of a whole batch."""
    return evaluate(bound, loss_batch(bound, batch))


def _per_token(answer: Any) -> Any:
    return answer.per_token if isinstance(answer, LossOutputs) else answer


def _shape(bound: Bound, x: LossInputs) -> None:
    values = _per_token(bound(x))
    require(isinstance(values, torch.Tensor), f"returned a {type(values).__name__}")
    shape, N = list(values.shape), x.token_count
    require(shape == [N], f"returned the shape {shape}; N={N} (the core does the reduction)")
    require(values.isfinite().all(), f"returned {shown(values)}")


def _differentiable(bound: Bound, batch: Batch) -> None:
    values = _per_token(bound(loss_batch(bound, batch, on_policy=True)))
    require(values.requires_grad, "the result has no gradient: x.logprobs was detached")


def _direction(bound: Bound, batch: Batch) -> None:
    x = loss_batch(bound, batch, on_policy=True)
    _, gradient = evaluate(bound, x)
    wrong = gradient * x.advantages > 1e-12
    require(
        not wrong.any(),
        f"on policy the gradient is {shown(gradient)} for the advantages {shown(x.advantages)}",
    )
    require(gradient.any(), f"on policy the gradient is 0 for the advantages {shown(x.advantages)}")


def _extreme(bound: Bound, batch: Batch, gaps: list[float]) -> None:
    x = loss_batch(bound, batch, gaps=gaps)
    values, gradient = evaluate(bound, x)
    ratios = [gaps[t % len(gaps)] for t in range(batch.tokens)]
    require(values.isfinite().all(), f"log-ratios {ratios} give the values {shown(values)}")
    require(gradient.isfinite().all(), f"log-ratios {ratios} give the gradient {shown(gradient)}")


def _finite(bound: Bound, x: LossInputs) -> None:
    values, gradient = evaluate(bound, x)
    require(values.isfinite().all(), f"returned {shown(values)}")
    require(gradient.isfinite().all(), f"the gradient is {shown(gradient)}")


def _permuted(bound: Bound, batch: Batch, order: list[int]) -> None:
    usual = value_and_gradient(bound, batch)
    other = evaluate(bound, loss_batch(bound, batch, order))
    for what, before, after in zip(("values", "gradient"), usual, other, strict=True):
        expected = batch.permute_tokens(before, order)
        require(
            close(expected, after),
            f"rollouts in the order {order}: {what} {shown(after)} instead of {shown(expected)}",
        )


def _split(bound: Bound, batch: Batch) -> None:
    usual = value_and_gradient(bound, batch)
    middle = len(batch.group) // 2
    halves = [range(middle), range(middle, len(batch.group))]
    parts = [evaluate(bound, loss_batch(bound, batch, half)) for half in halves]
    for index, what in enumerate(("values", "gradient")):
        joined = torch.cat([part[index] for part in parts])
        require(
            close(usual[index], joined),
            f"in two micro-batches the {what} are {shown(joined)} instead of "
            f"{shown(usual[index])}; x.step_old_logprobs and x.step_advantages hold the whole step",
        )


def _in_step(bound: Bound, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
    return evaluate(bound, loss_batch(bound, batch, step=step))


def _counts_once(bound: Bound, batch: Batch) -> None:
    middle = len(batch.group) // 2
    whole, parts = bound.ref.resolve(), bound.ref.resolve()
    evaluate(whole, loss_batch(bound, batch))
    for half in (range(middle), range(middle, len(batch.group))):
        evaluate(parts, loss_batch(bound, batch, half))
    expected, got = _in_step(whole, batch, 1), _in_step(parts, batch, 1)
    require(
        _same(expected, got),
        f"after a step in two micro-batches the values are {shown(got[0])} instead of "
        f"{shown(expected[0])}; a new x.metadata['step'] begins a step",
    )


def _mutates(bound: Bound, batch: Batch) -> None:
    x = loss_batch(bound, batch)
    before = snapshot(x)
    bound(x)
    changed = unchanged(before, snapshot(x))
    require(not changed, f"changed x.{', x.'.join(changed)} in place")


def _deterministic(bound: Bound, batch: Batch) -> None:
    first, second = value_and_gradient(bound, batch), value_and_gradient(bound, batch)
    for before, after in zip(first, second, strict=True):
        same = torch.equal(before, after)
        require(same, f"two calls give {shown(before)} and {shown(after)}")


def _dtype(bound: Bound, batch: Batch) -> None:
    values = _per_token(bound(loss_batch(bound, batch)))
    require(values.dtype == torch.float64, f"float64 inputs give {values.dtype}")


def _same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(close(here, there) for here, there in zip(first, second, strict=True))
