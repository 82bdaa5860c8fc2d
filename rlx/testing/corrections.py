"""`check_correction`: what every correction of the engine/learner mismatch must hold.

Legend: B rollouts, N action tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from rlx.core.component import Bound
from rlx.core.inputs import CorrectionInputs
from rlx.core.ragged import Tensor
from rlx.testing.cases import (
    Batch,
    close,
    empty_actions,
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
from rlx.testing.inputs import correction_inputs
from rlx.testing.violations import EXAMPLES, Checker, label_of

_GAPS = (0.0, 1000.0, -1000.0, float("inf"), float("nan"))
"""Differences between the learner's and the engine's log-probs; engines do report −∞ and NaN."""


def check_correction(target: Any, *, examples: int = EXAMPLES, **params: Any) -> None:
    """Check the maths of a correction; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        examples: generated batches per rule.
        params: parameters of the component.
    """
    bound = restarted(bind("corrections", target, params))
    checker = Checker(f"correction {label_of(target)}", examples=examples)
    if checker.holds("returns [N] weights", ordinary(), lambda batch: _shape(bound, batch)):
        _check_maths(checker, bound)
        _check_manners(checker, bound)
    check_parameters(checker, bound)
    checker.finish()


def _check_maths(checker: Checker, bound: Bound) -> None:
    checker.holds("returns no negative weights", ordinary(), lambda b: _sign(bound, b))
    checker.holds(
        "returns 1 where engine and learner agree", ordinary(), lambda b: _agreement(bound, b)
    )
    gaps = st.tuples(ordinary(), st.lists(st.sampled_from(_GAPS), min_size=3, max_size=3))
    checker.holds("stays finite at extreme differences", gaps, lambda case: _extreme(bound, *case))
    checker.holds(
        "stays finite when a rollout has no action tokens",
        empty_actions(),
        lambda batch: _finite(bound(correction_batch(batch))),
    )
    checker.holds(
        "gives a rollout the same weights whatever else is in the micro-batch",
        ordinary().filter(lambda batch: len(batch.group) > 1),
        lambda batch: _alone(bound, batch),
    )


def _check_manners(checker: Checker, bound: Bound) -> None:
    checker.holds("leaves its inputs as they are", ordinary(), lambda b: _mutates(bound, b))
    checker.holds("is deterministic", ordinary(), lambda b: _deterministic(bound, b))
    checker.holds("keeps float64", ordinary(), lambda b: _dtype(bound, b))
    batch = Batch(group=(0, 0), rewards=(0.0, 1.0), lengths=(2, 3))
    check_travel(checker, bound, batch, weights, close)
    check_state(checker, bound, ordinary(), lambda one, b, _: weights(one, b), close)


def correction_batch(
    batch: Batch,
    rollouts: Sequence[int] | None = None,
    *,
    spread: float = 1.0,
    gaps: Sequence[float] | None = None,
) -> CorrectionInputs:
    """Build the inputs of some of the batch's rollouts, all of them unless said otherwise.

    Args:
        spread: largest difference between the two log-probs.
        gaps: differences that take turns over the tokens, instead.
    """
    rollouts = range(len(batch.group)) if rollouts is None else rollouts
    old = batch.numbers("old_logprobs", -3.0, -1.0)
    difference = batch.numbers("difference", -spread, spread)
    if gaps is not None:
        difference = torch.tensor([gaps[t % len(gaps)] for t in range(batch.tokens)]).double()
    return correction_inputs(
        old_logprobs=batch.permute_tokens(old, rollouts),
        rollout_logprobs=batch.permute_tokens(old - difference, rollouts),
        lengths=[batch.lengths[index] for index in rollouts],
        group=[batch.group[index] for index in rollouts],
        turn=batch.permute_tokens(batch.turns(), rollouts),
    )


def weights(bound: Bound, batch: Batch) -> Tensor:
    """Return the weights [N] of a whole batch."""
    answer: Tensor = bound(correction_batch(batch))
    return answer


def _shape(bound: Bound, batch: Batch) -> None:
    answer = weights(bound, batch)
    require(isinstance(answer, torch.Tensor), f"returned a {type(answer).__name__}")
    shape = list(answer.shape)
    require(shape == [batch.tokens], f"returned the shape {shape}; N={batch.tokens}")
    require(answer.is_floating_point(), f"returned {answer.dtype}")
    _finite(answer)


def _finite(answer: Tensor) -> None:
    require(answer.isfinite().all(), f"returned {shown(answer)}")


def _sign(bound: Bound, batch: Batch) -> None:
    answer = weights(bound, batch)
    require((answer >= 0).all(), f"returned {shown(answer)}")


def _agreement(bound: Bound, batch: Batch) -> None:
    answer = bound(correction_batch(batch, spread=0.0))
    require(close(answer, torch.ones_like(answer)), f"returned {shown(answer)}")


def _extreme(bound: Bound, batch: Batch, gaps: list[float]) -> None:
    answer = bound(correction_batch(batch, gaps=gaps))
    differences = [gaps[t % len(gaps)] for t in range(batch.tokens)]
    require(answer.isfinite().all(), f"differences {differences} give {shown(answer)}")


def _alone(bound: Bound, batch: Batch) -> None:
    together = weights(bound, batch)
    alone = torch.cat(
        [bound(correction_batch(batch, [index])) for index in range(len(batch.group))]
    )
    require(
        close(together, alone),
        f"one by one the rollouts get {shown(alone)}, together {shown(together)}",
    )


def _mutates(bound: Bound, batch: Batch) -> None:
    x = correction_batch(batch)
    before = snapshot(x)
    bound(x)
    changed = unchanged(before, snapshot(x))
    require(not changed, f"changed x.{', x.'.join(changed)} in place")


def _deterministic(bound: Bound, batch: Batch) -> None:
    first, second = weights(bound, batch), weights(bound, batch)
    require(torch.equal(first, second), f"two calls give {shown(first)} and {shown(second)}")


def _dtype(bound: Bound, batch: Batch) -> None:
    dtype = weights(bound, batch).dtype
    require(dtype == torch.float64, f"float64 inputs give {dtype}")
