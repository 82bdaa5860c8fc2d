"""The objectives against plain loops in Python floats, value and gradient."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlx.core.errors import ComponentError, UsageError
from rlx.core.objective import Denominators
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.offline.needs import needs_of
from rlx.core.offline.share import objective_share
from rlx.plugins.objectives.dpo import dpo
from rlx.plugins.objectives.ipo import ipo
from rlx.plugins.objectives.kto import kto
from rlx.plugins.objectives.orpo import orpo
from rlx.plugins.objectives.prm import prm
from rlx.plugins.objectives.rm import rm
from rlx.plugins.objectives.sft import sft
from rlx.plugins.objectives.simpo import simpo
from rlx.testing import objective_inputs

LENGTHS = [3, 1, 2, 4, 1, 2]
Rows = list[list[float]]
Loop = Callable[..., list[float]]


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z))


def nll_loop(own: Rows, ref: Rows) -> list[float]:
    return [-value for row in own for value in row]


def dpo_loop(
    own: Rows, ref: Rows, *, beta: float = 0.1, label_smoothing: float = 0.0, nll_coef: float = 0.0
) -> list[float]:
    losses = []
    for pair in range(len(own) // 2):
        c, r = 2 * pair, 2 * pair + 1
        h = beta * ((sum(own[c]) - sum(ref[c])) - (sum(own[r]) - sum(ref[r])))
        loss = -(1 - label_smoothing) * math.log(sigmoid(h))
        loss -= label_smoothing * math.log(sigmoid(-h))
        losses.append(loss - nll_coef * sum(own[c]) / len(own[c]))
    return losses


def ipo_loop(
    own: Rows, ref: Rows, *, beta: float = 0.1, length_normalized: bool = False
) -> list[float]:
    def delta(row: int) -> float:
        total = sum(own[row]) - sum(ref[row])
        return total / len(own[row]) if length_normalized else total

    return [
        (delta(2 * pair) - delta(2 * pair + 1) - 1 / (2 * beta)) ** 2
        for pair in range(len(own) // 2)
    ]


def simpo_loop(own: Rows, ref: Rows, *, beta: float = 2.0, gamma: float = 1.0) -> list[float]:
    mean = [sum(row) / len(row) for row in own]
    return [
        -math.log(sigmoid(beta * (mean[2 * pair] - mean[2 * pair + 1]) - gamma))
        for pair in range(len(own) // 2)
    ]


def orpo_loop(own: Rows, ref: Rows, *, beta: float = 0.1) -> list[float]:
    losses = []
    for pair in range(len(own) // 2):
        c, r = (sum(own[row]) / len(own[row]) for row in (2 * pair, 2 * pair + 1))
        odds_c, odds_r = (math.exp(m) / (1 - math.exp(m)) for m in (c, r))
        losses.append(-c - beta * math.log(sigmoid(math.log(odds_c / odds_r))))
    return losses


def kto_loop(
    own: Rows,
    ref: Rows,
    *,
    kl: float,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> list[float]:
    losses = []
    for row, (ours, theirs) in enumerate(zip(own, ref, strict=True)):
        delta, z = sum(ours) - sum(theirs), max(kl, 0.0)
        if row % 2 == 0:
            losses.append(desirable_weight * (1 - sigmoid(beta * (delta - z))))
        else:
            losses.append(undesirable_weight * (1 - sigmoid(beta * (z - delta))))
    return losses


def prm_loop(scores: list[float], labels: list[float]) -> list[float]:
    return [
        -y * math.log(sigmoid(z)) - (1 - y) * math.log(1 - sigmoid(z))
        for z, y in zip(scores, labels, strict=True)
    ]


def rm_loop(
    scores: list[float], margins: list[float], *, form: str = "sigmoid", center: float = 0.0
) -> list[float]:
    losses = []
    for pair, margin in enumerate(margins):
        c, r = scores[2 * pair], scores[2 * pair + 1]
        if form == "sigmoid":
            loss = -math.log(sigmoid(c - r - margin))
        else:
            loss = math.log(1 + math.exp(r - c))
        losses.append(loss + center * (c + r) ** 2)
    return losses


def drawn(seed: int, count: int, low: float = -3.0, high: float = -0.3) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(low, high) for _ in range(count)]


def split(values: list[float]) -> Rows:
    rows, start = [], 0
    for length in LENGTHS:
        rows.append(values[start : start + length])
        start += length
    return rows


def by_differences(function: Callable[[list[float]], float], at: list[float]) -> list[float]:
    """Gradient by central differences of a function of plain floats."""
    step, gradient = 1e-5, []
    for place in range(len(at)):
        up, down = list(at), list(at)
        up[place] += step
        down[place] -= step
        gradient.append((function(up) - function(down)) / (2 * step))
    return gradient


def agrees(
    objective: Callable[[ObjectiveInputs], Any],
    x: ObjectiveInputs,
    leaf: torch.Tensor,
    loop: Callable[[list[float]], list[float]],
) -> None:
    answer = objective(x)
    loss = answer.loss if isinstance(answer, ObjectiveOutputs) else answer
    at = leaf.tolist()
    assert loss.dtype == torch.float64
    assert loss.tolist() == pytest.approx(loop(at), rel=1e-9, abs=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    expected = by_differences(lambda values: math.fsum(loop(values)), at)
    assert gradient.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-8)


ON_LOGPROBS: dict[str, tuple[Any, Loop, dict[str, Any]]] = {
    "sft": (sft, nll_loop, {}),
    "dpo": (dpo, dpo_loop, {}),
    "dpo, smoothed, with likelihood": (
        dpo,
        dpo_loop,
        {"beta": 0.7, "label_smoothing": 0.2, "nll_coef": 0.3},
    ),
    "ipo": (ipo, ipo_loop, {"beta": 0.25}),
    "ipo per token": (ipo, ipo_loop, {"beta": 0.5, "length_normalized": True}),
    "simpo": (simpo, simpo_loop, {"beta": 1.5, "gamma": 0.4}),
    "orpo": (orpo, orpo_loop, {"beta": 0.6}),
}


@pytest.mark.parametrize("case", ON_LOGPROBS)
def test_objective_on_logprobs_is_its_formula(case: str) -> None:
    objective, loop, params = ON_LOGPROBS[case]
    N = sum(LENGTHS)
    ref = drawn(2, N)
    leaf = torch.tensor(drawn(1, N), dtype=torch.float64, requires_grad=True)
    paired = {"side": [True, False] * 3} if needs_of(objective).data == "pairs" else {}
    x = objective_inputs(logprobs=leaf, ref_logprobs=ref, lengths=LENGTHS, **paired)
    bound = functools.partial(objective, **params)
    agrees(bound, x, leaf, lambda own: loop(split(own), split(ref), **params))


@pytest.mark.parametrize("kl", [-0.8, 0.9], ids=["negative", "positive"])
def test_kto_is_its_formula(kl: float) -> None:
    params = {"beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.6}
    N = sum(LENGTHS)
    ref = drawn(4, N)
    leaf = torch.tensor(drawn(3, N), dtype=torch.float64, requires_grad=True)
    x = objective_inputs(
        logprobs=leaf,
        ref_logprobs=ref,
        lengths=LENGTHS,
        desirable=[True, False] * 3,
        kl_baseline=kl,
    )
    bound = functools.partial(kto, **params)
    agrees(bound, x, leaf, lambda own: kto_loop(split(own), split(ref), kl=kl, **params))


@pytest.mark.parametrize("form", ["sigmoid", "log_exp"])
def test_rm_is_its_formula(form: str) -> None:
    margins, params = [0.0, 0.5, 1.2], {"form": form, "center": 0.1}
    leaf = torch.tensor(drawn(5, 6, -2, 2), dtype=torch.float64, requires_grad=True)
    x = objective_inputs(scores=leaf, side=[True, False] * 3, margin=margins)
    bound = functools.partial(rm, **params)
    agrees(bound, x, leaf, lambda scores: rm_loop(scores, margins, **params))


def test_prm_is_its_formula() -> None:
    labels = [1.0, 0.0, 0.25, 1.0]
    leaf = torch.tensor(drawn(6, 4, -2, 2), dtype=torch.float64, requires_grad=True)
    x = objective_inputs(token_scores=leaf, labels=labels, lengths=[3, 1])
    agrees(prm, x, leaf, lambda scores: prm_loop(scores, labels))


def test_ties_count_half_in_accuracy() -> None:
    x = objective_inputs(scores=[1.0, 1.0, 2.0, 0.0], side=[True, False, True, False])
    assert rm(x).metrics["accuracy"].tolist() == [0.5, 1.0]


def test_steps_without_a_verdict_do_not_count_in_accuracy() -> None:
    x = objective_inputs(token_scores=[1.0, -1.0, 1.0], labels=[1.0, 0.5, 0.0])
    assert prm(x).metrics["accuracy"].tolist() == [1.0, 0.0]


def test_certain_answer_keeps_orpo_finite() -> None:
    leaf = torch.tensor([0.0, -1.0], dtype=torch.float64, requires_grad=True)
    loss = orpo(objective_inputs(logprobs=leaf, side=[True, False])).loss
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()


def test_share_divides_by_the_units_of_the_whole_step() -> None:
    x = objective_inputs(logprobs=[-1.0, -2.0, -3.0], lengths=[2, 1])
    step = Denominators(tokens=12, sequences=8)
    assert objective_share(x, objective=sft, per="token", denominators=step).loss == 0.5

    def per_sequence(x: ObjectiveInputs) -> torch.Tensor:
        return -x.sequence_sum(x.logprobs)

    share = objective_share(x, objective=per_sequence, per="sequence", denominators=step)
    assert share.loss == 6 / 8


def test_sequences_of_pairs_are_twice_the_rows() -> None:
    x = objective_inputs(scores=[1.0, 3.0], side=[True, False])
    step = Denominators(tokens=8, sequences=4)
    share = objective_share(x, objective=lambda x: x.scores, per="sequence", denominators=step)
    assert share.loss == 4 / 8
    gap = objective_share(x, objective=lambda x: x.chosen(x.scores), per="pair", denominators=step)
    assert gap.loss == 1 / 4


def test_wrong_unit_is_an_error_that_names_the_right_one() -> None:
    x = objective_inputs(scores=[1.0, 3.0], side=[True, False])
    step = Denominators(tokens=2, sequences=1)
    with pytest.raises(ComponentError, match=r"one value per pair, \[K\] = \[1\]"):
        objective_share(x, objective=lambda x: x.scores, per="pair", denominators=step)


@pytest.mark.parametrize(
    ("tags", "words"),
    [
        ({"data": "pair"}, "data='pair'"),
        ({"data": "conversations", "per": "pair"}, "no meaning"),
        ({"head": "score", "per": "token"}, "no number for a token"),
        ({"head": "logits", "per": "sequence"}, "pieces of sequences"),
        ({"head": "score", "requires": {"ref_logprobs"}}, "can't require 'ref_logprobs'"),
        ({"requires": {"kl_baseline"}}, "no kl_baseline"),
        ({"requires": {"values"}}, "can't require 'values'"),
    ],
)
def test_tags_that_mean_nothing_are_refused(tags: dict[str, Any], words: str) -> None:
    from rlx import component

    with pytest.raises(UsageError, match=words):
        needs_of(component(**tags)(lambda x: x.logprobs))
