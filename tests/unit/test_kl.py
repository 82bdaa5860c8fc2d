"""KL estimators: values, bounds, the gradients that the docstring claims, controllers."""

from __future__ import annotations

import math

import pytest
import torch

from rlx.core.errors import UsageError
from rlx.core.kl import AdaptiveKL, FixedKL, kl_penalty, kl_reward_to_go, kl_rewards


def test_estimators_are_their_formulas() -> None:
    d = torch.tensor([-1.5, -0.1, 0.0, 0.2, 2.0], dtype=torch.float64)
    zero = torch.zeros_like(d)
    assert torch.allclose(kl_penalty(d, zero, "k1"), d)
    assert torch.allclose(kl_penalty(d, zero, "k2"), d**2 / 2)
    assert torch.allclose(kl_penalty(d, zero, "k3"), torch.exp(-d) - 1 + d)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_penalty_is_bounded_and_finite(estimator: str) -> None:
    bad = [-1e4, 1e4, -math.inf, math.nan]
    ref = torch.tensor([*bad, -1.0], dtype=torch.float64)
    logprobs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    k = kl_penalty(logprobs, ref, estimator)
    k.sum().backward()
    assert k.abs().max() <= 10
    assert k[-1].item() == 0.0
    assert k.isfinite().all()
    assert logprobs.grad is not None
    assert logprobs.grad.isfinite().all()


def test_gradients_on_policy_are_those_that_the_docstring_claims() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64)
    ref = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)

    def expected_gradient(estimator: str) -> torch.Tensor:
        """Σ_a π(a)·∇k(a): the mean gradient of the term over samples of the policy."""
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        term = (logprobs.detach().exp() * kl_penalty(logprobs, ref, estimator)).sum()
        return torch.autograd.grad(term, leaf)[0]

    def true_gradient(forward: bool) -> torch.Tensor:
        leaf = logits.clone().requires_grad_()
        logprobs = leaf.log_softmax(0)
        kl = (ref.exp() * (ref - logprobs)) if forward else (logprobs.exp() * (logprobs - ref))
        return torch.autograd.grad(kl.sum(), leaf)[0]

    assert torch.allclose(expected_gradient("k1"), torch.zeros(6, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(expected_gradient("k2"), true_gradient(forward=False))
    assert torch.allclose(expected_gradient("k3"), true_gradient(forward=True))


def test_kl_rewards_carry_no_gradient_and_add_up_to_go() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    rewards = kl_rewards(logprobs, torch.tensor([-1.5, -2.0, -4.0]), coef=0.1, estimator="k1")
    assert not rewards.requires_grad
    assert rewards.tolist() == pytest.approx([-0.05, 0.0, -0.1])
    to_go = kl_reward_to_go(rewards, torch.tensor([2, 0, 1]))
    assert to_go.tolist() == pytest.approx([-0.05, 0.0, -0.1])


def test_unknown_estimator_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="k1, k2, k3") as caught:
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_variance")
    assert caught.value.where == "kl.estimator"


def test_fixed_coefficient_stays() -> None:
    controller = FixedKL(0.1)
    assert controller.update(100.0, 64) == 0.1


def test_adaptive_coefficient_moves_towards_the_target_by_a_bounded_step() -> None:
    controller = AdaptiveKL(0.1, target=2.0, horizon=1000)
    assert controller.update(2.2, 100) == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert AdaptiveKL(0.1, target=2.0, horizon=1000).update(50.0, 100) == pytest.approx(0.102)
    assert AdaptiveKL(0.1, target=2.0, horizon=1000).update(0.0, 100) == pytest.approx(0.098)


@pytest.mark.parametrize("kl", [0.0, 50.0])
def test_adaptive_coefficient_keeps_its_sign_over_steps_of_many_horizons(kl: float) -> None:
    controller = AdaptiveKL(0.1, target=2.0, horizon=10)
    assert controller.update(kl, 1000) == pytest.approx(0.08 if kl == 0 else 0.12)
    assert all(controller.update(0.0, 1000) > 0 for _ in range(50))


def test_adaptive_state_continues_after_a_restart() -> None:
    first = AdaptiveKL(0.1, target=2.0, horizon=100)
    first.update(5.0, 32)
    second = AdaptiveKL(0.1, target=2.0, horizon=100)
    second.load_state_dict(first.state_dict())
    assert second.update(1.0, 32) == first.update(1.0, 32)


def test_coefficient_that_was_changed_for_the_restart_counts() -> None:
    reached = AdaptiveKL(0.1, target=2.0, horizon=100)
    reached.update(5.0, 32)
    for resumed in (FixedKL(0.5), AdaptiveKL(0.5, target=2.0, horizon=100)):
        for before in (FixedKL(0.0), FixedKL(0.1), reached):
            resumed.load_state_dict(before.state_dict())
            assert resumed.coef == 0.5
