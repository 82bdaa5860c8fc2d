"""`check_objective`: what every objective of offline training must hold.

Legend: B sequences, N trained tokens, K pairs, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from rlx.core.component import Bound
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.offline.needs import Needs, needs_of
from rlx.core.ragged import Tensor
from rlx.testing.cases import close, require, shown, snapshot, unchanged
from rlx.testing.components import (
    bind,
    check_parameters,
    check_state,
    check_travel,
    keeps_state,
    restarted,
    saved,
)
from rlx.testing.objective_cases import LEAVES, Case, cases
from rlx.testing.violations import EXAMPLES, Broken, Checker, label_of

_EXTREMES = {
    "lm": (0.0, -50.0, -1000.0, -1e-9),
    "logits": (0.0, 1000.0, -1000.0),
    "score": (0.0, 1000.0, -1000.0),
    "token": (0.0, 1000.0, -1000.0),
}


def check_objective(target: Any, *, examples: int = EXAMPLES, **params: Any) -> None:
    """Check the maths of an objective; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        examples: generated micro-batches per rule.
        params: parameters of the component.
    """
    bound = restarted(bind("objectives", target, params))
    checker = Checker(f"objective {label_of(target)}", examples=examples)
    if checker.once("declares tags that fit together", lambda: _declares(bound)):
        needs = needs_of(bound)
        unit = {"token": "[N]", "sequence": "[B]", "pair": "[K]"}[needs.per]
        runs = checker.holds(f"returns {unit} numbers", cases(needs), lambda c: _shape(bound, c))
        if runs and checker.holds("has a gradient", cases(needs), lambda c: _differs(bound, c)):
            _check_maths(checker, bound, needs)
            _check_manners(checker, bound, needs)
    check_parameters(checker, bound)
    checker.finish()


def _check_maths(checker: Checker, bound: Bound, needs: Needs) -> None:
    checker.holds(
        "gets smaller when the model does what the data wants",
        cases(needs),
        lambda case: _direction(bound, case),
    )
    extremes = st.lists(st.sampled_from(_EXTREMES[needs.head]), min_size=3, max_size=3)
    checker.holds(
        "stays finite at extreme answers of the model, value and gradient",
        st.tuples(cases(needs), extremes),
        lambda case: _extreme(bound, *case),
    )
    shuffled = cases(needs, rows=(2, 3)).flatmap(
        lambda case: st.tuples(st.just(case), st.permutations(range(len(case.lengths))))
    )
    checker.holds(
        "does not depend on the order of the sequences",
        shuffled,
        lambda case: _permuted(bound, *case),
    )
    checker.holds(
        "has the same values and gradient in one micro-batch and in several",
        cases(needs, rows=(2, 4)),
        lambda case: _split(bound, case),
    )


def _check_manners(checker: Checker, bound: Bound, needs: Needs) -> None:
    checker.holds("leaves its inputs as they are", cases(needs), lambda c: _mutates(bound, c))
    checker.holds("is deterministic", cases(needs), lambda c: _deterministic(bound, c))
    checker.holds("keeps float64", cases(needs), lambda c: _dtype(bound, c))
    checker.holds("reports metrics as tensors", cases(needs), lambda c: _metrics(bound, c))
    lengths = (1, 1, 1, 1) if needs.head == "score" else (2, 1, 3, 1)
    check_travel(checker, bound, Case(needs=needs, lengths=lengths), value_and_gradient, _same)
    check_state(checker, bound, cases(needs), _in_step, _same)
    if keeps_state(bound):
        checker.holds(
            "keeps its state while held-out data is evaluated (x.training is False)",
            cases(needs),
            lambda case: _evaluates(bound, case),
        )
        checker.holds(
            "counts a step once, in however many micro-batches it comes",
            cases(needs, rows=(2, 4)),
            lambda case: _counts_once(bound, case),
        )


def evaluate(bound: Bound, x: ObjectiveInputs) -> tuple[Tensor, Tensor]:
    """Return the loss in its unit and the gradient of its sum with respect to the answers."""
    values = _values(bound(x))
    leaf = next(x.get(name) for name in LEAVES.values() if x.has(name))
    (gradient,) = torch.autograd.grad(values.sum(), leaf, allow_unused=True, materialize_grads=True)
    return values.detach(), gradient


def value_and_gradient(bound: Bound, case: Case) -> tuple[Tensor, Tensor]:
    """Return loss and gradient of a whole micro-batch."""
    return evaluate(bound, case.inputs())


def _values(answer: Any) -> Any:
    return answer.loss if isinstance(answer, ObjectiveOutputs) else answer


def _declares(bound: Bound) -> None:
    needs_of(bound)


def _shape(bound: Bound, case: Case) -> None:
    x = case.inputs()
    values = _values(bound(x))
    require(isinstance(values, torch.Tensor), f"returned a {type(values).__name__}")
    per = case.needs.per
    count = {"token": sum(case.lengths), "sequence": len(case.lengths)}.get(per, case.rows)
    require(
        list(values.shape) == [count],
        f"returned the shape {list(values.shape)}; per={per!r} means [{count}] here "
        "(the core does the reduction)",
    )
    require(values.isfinite().all(), f"returned {shown(values)}")


def _differs(bound: Bound, case: Case) -> None:
    values = _values(bound(case.inputs()))
    name = LEAVES[case.needs.head]
    require(values.requires_grad, f"the result has no gradient: x.{name} was detached")


def _direction(bound: Bound, case: Case) -> None:
    answers = case.answers()
    x = case.inputs(reference=answers if case.needs.head == "lm" else None)
    _, gradient = evaluate(bound, x)
    slope = float((gradient * case.improved()).sum())
    wanted = {
        "conversations": "more likely trained tokens",
        "pairs": "a better chosen and a worse rejected sequence",
        "unpaired": "a better desirable and a worse undesirable sequence",
        "steps": "higher numbers at right steps and lower ones at wrong steps",
    }[case.needs.data]
    require(slope < 0, f"the slope of the loss towards {wanted} is {slope:.3g}, not below 0")


def _extreme(bound: Bound, case: Case, numbers: list[float]) -> None:
    shape = case.answers().shape
    answers = torch.tensor([numbers[i % len(numbers)] for i in range(shape.numel())]).double()
    values, gradient = evaluate(bound, case.inputs(answers=answers.reshape(shape)))
    said = f"answers {shown(answers)}"
    require(values.isfinite().all(), f"{said} give the values {shown(values)}")
    require(gradient.isfinite().all(), f"{said} give the gradient {shown(gradient)}")


def _permuted(bound: Bound, case: Case, order: list[int]) -> None:
    values, gradient = value_and_gradient(bound, case)
    found, other = evaluate(bound, case.inputs(order))
    tokens = case.tokens_of(order)
    place = {"token": tokens, "sequence": torch.tensor(order)}.get(case.needs.per)
    expected = values if place is None else values[place]  # pairs are in the order of the rows
    require(
        close(expected, found),
        f"sequences in the order {order}: values {shown(found)} instead of {shown(expected)}",
    )
    wanted = gradient[order] if case.needs.head == "score" else gradient[tokens]
    require(
        close(wanted, other),
        f"sequences in the order {order}: gradient {shown(other)} instead of {shown(wanted)}",
    )


def _halves(case: Case) -> list[list[int]]:
    middle = case.rows // 2 * case.per_row
    return [list(range(middle)), list(range(middle, len(case.lengths)))]


def _split(bound: Bound, case: Case) -> None:
    usual = value_and_gradient(bound, case)
    parts = [evaluate(bound, case.inputs(half)) for half in _halves(case)]
    for index, what in enumerate(("values", "gradient")):
        joined = torch.cat([part[index] for part in parts])
        require(
            close(usual[index], joined),
            f"in two micro-batches the {what} are {shown(joined)} instead of "
            f"{shown(usual[index])}; a value may depend on its own row only",
        )


def _mutates(bound: Bound, case: Case) -> None:
    x = case.inputs()
    before = snapshot(x)
    bound(x)
    changed = unchanged(before, snapshot(x))
    require(not changed, f"changed x.{', x.'.join(changed)} in place")


def _deterministic(bound: Bound, case: Case) -> None:
    first, second = value_and_gradient(bound, case), value_and_gradient(bound, case)
    for before, after in zip(first, second, strict=True):
        same = torch.equal(before, after)
        require(same, f"two calls give {shown(before)} and {shown(after)}")


def _dtype(bound: Bound, case: Case) -> None:
    values = _values(bound(case.inputs()))
    require(values.dtype == torch.float64, f"float64 inputs give {values.dtype}")


def _metrics(bound: Bound, case: Case) -> None:
    answer = bound(case.inputs())
    for name, value in answer.metrics.items() if isinstance(answer, ObjectiveOutputs) else ():
        require(isinstance(value, torch.Tensor), f"{name!r} is a {type(value).__name__}")
        require(value.ndim <= 1, f"{name!r} has the shape {list(value.shape)}")
        require(value.isfinite().all(), f"{name!r} is {shown(value)}")


def _in_step(bound: Bound, case: Case, step: int) -> tuple[Tensor, Tensor]:
    return evaluate(bound, case.inputs(step=step))


def _evaluates(bound: Bound, case: Case) -> None:
    one = bound.ref.resolve()
    evaluate(one, case.inputs(step=0))
    before = saved(one.state_dict())
    evaluate(one, replace(case, seed=case.seed + 1).inputs(step=1, training=False))
    after = saved(one.state_dict())
    require(
        before.keys() == after.keys() and all(_equal(before[key], after[key]) for key in before),
        f"evaluating changes the state from {before!r} to {after!r}",
    )


def _counts_once(bound: Bound, case: Case) -> None:
    whole, parts = bound.ref.resolve(), bound.ref.resolve()
    evaluate(whole, case.inputs())
    for half in _halves(case):
        evaluate(parts, case.inputs(half))
    expected, got = _in_step(whole, case, 1), _in_step(parts, case, 1)
    if not _same(expected, got):
        raise Broken(
            f"after a step in two micro-batches the values are {shown(got[0])} instead of "
            f"{shown(expected[0])}; a new x.step begins a step"
        )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def _same(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> bool:
    return all(close(here, there) for here, there in zip(first, second, strict=True))
