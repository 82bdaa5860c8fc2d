"""`distill` against loops in float64: values and gradients of each divergence."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.plugins.objectives.distill import distill

N, V = 7, 11


def inputs(student: Tensor, teacher: Tensor) -> ObjectiveInputs:
    return ObjectiveInputs(
        lengths=torch.tensor([4, 0, 3]),
        group=torch.arange(3),
        turn=torch.zeros(N, dtype=torch.int64),
        targets=torch.arange(N) % V,
        logits=student,
        teacher_logits=teacher,
    )


def logits(scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    student, teacher = (
        scale * torch.randn(N, V, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    return student.requires_grad_(), teacher


def softmax(row: list[float], temperature: float) -> list[float]:
    weights = [math.exp(value / temperature) for value in row]
    return [weight / math.fsum(weights) for weight in weights]


def divergence_of(p: list[float], q: list[float], name: str, beta: float) -> float:
    def kl(a: list[float], b: list[float]) -> float:
        return math.fsum(i * math.log(i / j) for i, j in zip(a, b, strict=True))

    if name == "forward_kl":
        return kl(p, q)
    if name == "reverse_kl":
        return kl(q, p)
    m = [beta * i + (1 - beta) * j for i, j in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def by_loops(student: Tensor, teacher: Tensor, **options: Any) -> list[float]:
    name = options.get("divergence", "forward_kl")
    tau, beta = options.get("temperature", 1.0), options.get("beta", 0.5)
    values = []
    for token in range(N):
        z, t = student[token].tolist(), teacher[token].tolist()
        value = divergence_of(softmax(t, tau), softmax(z, tau), name, beta)
        nll = -math.log(softmax(z, 1.0)[token % V])
        values.append(value + options.get("nll_coef", 0.0) * nll)
    return values


OPTIONS: list[dict[str, Any]] = [
    {"divergence": "forward_kl"},
    {"divergence": "reverse_kl"},
    {"divergence": "js"},
    {"divergence": "js", "beta": 0.1, "temperature": 2.0},
    {"divergence": "js", "beta": 0.9, "nll_coef": 0.5},
    {"divergence": "reverse_kl", "temperature": 0.7, "nll_coef": 1.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_value_and_gradient_are_those_of_loops(options: dict[str, Any]) -> None:
    student, teacher = logits()
    found = distill(inputs(student, teacher), **options)
    assert found.loss.dtype == torch.float64
    assert found.loss.tolist() == pytest.approx(by_loops(student, teacher, **options), rel=1e-9)
    (gradient,) = torch.autograd.grad(found.loss.sum(), student)
    step = 1e-5
    for token, word in ((0, 0), (2, 5), (6, 10)):
        up, down = (student.detach().clone() for _ in range(2))
        up[token, word] += step
        down[token, word] -= step
        rise = by_loops(up, teacher, **options)[token] - by_loops(down, teacher, **options)[token]
        assert gradient[token, word].item() == pytest.approx(rise / (2 * step), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
def test_a_student_that_is_the_teacher_has_nothing_to_learn(divergence: Any) -> None:
    student, _ = logits()
    found = distill(inputs(student, student.detach() + 5.0), divergence=divergence)
    assert found.loss.abs().max() < 1e-12
    (gradient,) = torch.autograd.grad(found.loss.sum(), student)
    assert gradient.abs().max() < 1e-12
    assert found.metrics["agreement"].tolist() == [1.0] * N


def test_js_lies_between_the_two_directions() -> None:
    student, teacher = logits()
    x = inputs(student, teacher)
    forward = distill(x, divergence="forward_kl").loss
    reverse = distill(x, divergence="reverse_kl").loss
    small = distill(x, divergence="js", beta=1e-6).loss / 1e-6
    large = distill(x, divergence="js", beta=1 - 1e-6).loss / 1e-6
    assert torch.allclose(small, forward, rtol=1e-3)
    assert torch.allclose(large, reverse, rtol=1e-3)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "js"])
def test_extreme_logits_stay_finite(divergence: Any) -> None:
    student = torch.zeros(N, V, dtype=torch.float32)
    student[:, 0] = 1e4
    teacher = -student
    student.requires_grad_()
    found = distill(inputs(student, teacher), divergence=divergence)
    (gradient,) = torch.autograd.grad(found.loss.sum(), student)
    assert found.loss.isfinite().all()
    assert gradient.isfinite().all()
    assert (found.loss >= 0).all()


def test_gradient_steps_bring_the_student_to_the_teacher() -> None:
    student, teacher = logits()
    for divergence in ("forward_kl", "reverse_kl", "js"):
        z = student.detach().clone()
        losses = []
        for _ in range(300):
            z.requires_grad_()
            found: ObjectiveOutputs = distill(inputs(z, teacher), divergence=divergence)  # type: ignore[arg-type]
            losses.append(found.loss.mean().item())
            z = z.detach() - 1.0 * torch.autograd.grad(found.loss.sum(), z)[0]
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(losses))
        assert losses[-1] < 0.2 * losses[0]
