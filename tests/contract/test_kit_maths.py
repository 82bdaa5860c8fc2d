"""The kit's checks of maths: every rule has a component that breaks this rule and no other."""

from __future__ import annotations

import sys

import pytest
import torch

import rlx
from rlx.core.inputs import Advantages, LossOutputs
from rlx.testing import ConformanceError, check_correction, check_estimator, check_loss

EXAMPLES = 25
IN_CHILD = sys.argv[0].endswith("nursery.py")


def broken_rules(check, component) -> list[str]:
    try:
        check(component, examples=EXAMPLES)
    except ConformanceError as error:
        return [violation.rule for violation in error.violations]
    return []


def centred(x):
    return x.rewards - x.group_mean(x.rewards)


def good_estimator(x, *, eps: float = 1e-6):
    return centred(x) / (x.group_std(x.rewards) + eps)


@rlx.component(requires={"values"})
def good_critic(x, *, lam: float = 0.9):
    errors = x.token_rewards + x.next_token(x.values) - x.values
    advantages = x.discounted_sum(errors, lam)
    return Advantages(advantages, returns=advantages + x.values)


def scalar(x):
    return centred(x).sum()


def reads_what_it_does_not_require(x):
    return centred(x) + x.sequence_mean(x.values)


def nan_for_one(x):
    return torch.where(x.group_size > 1, centred(x), torch.nan)


def nan_for_constant(x):
    spread = x.group_std(x.rewards)
    return torch.where(x.group_size > 1, centred(x) / spread, centred(x))


def nan_for_empty(x):
    return centred(x) / x.lengths


def order_counts(x):
    return centred(x) * torch.arange(1, x.sequence_count + 1)


def group_numbers_count(x):
    return centred(x) * (1 + x.group)


def mutates(x):
    advantages = centred(x)
    x.rewards.zero_()
    return advantages


def random_below_rounding(x):
    return centred(x) + 1e-13 * torch.rand(x.sequence_count)


def halves_precision(x):
    return centred(x).float()


def keeps_gradient(x):
    return centred(x).requires_grad_()


def depends_on_the_process(x):
    return centred(x) * (2 if IN_CHILD else 1)


def parameter_without_plain_form(x, *, scale: object = object()):
    return centred(x)


ESTIMATORS = {
    "returns [B] or [N] numbers": scalar,
    "stays finite with a group of one rollout": nan_for_one,
    "stays finite when all rewards of a group are equal": nan_for_constant,
    "stays finite when a rollout has no action tokens": nan_for_empty,
    "does not depend on the order of the rollouts": order_counts,
    "does not depend on the numbers of the groups": group_numbers_count,
    "leaves its inputs as they are": mutates,
    "is deterministic": random_below_rounding,
    "keeps float64": halves_precision,
    "returns numbers without a gradient": keeps_gradient,
    "resolves in another process to the same component": depends_on_the_process,
    "parameters survive config.yaml": parameter_without_plain_form,
}


@pytest.mark.parametrize("component", [good_estimator, good_critic])
def test_right_estimator_passes(component) -> None:
    check_estimator(component, examples=EXAMPLES)


@pytest.mark.parametrize("rule", ESTIMATORS)
def test_wrong_estimator_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_estimator, ESTIMATORS[rule]) == [rule]


def test_undeclared_input_is_named() -> None:
    with pytest.raises(ConformanceError, match=r'requires=\{"values"\}'):
        check_estimator(reads_what_it_does_not_require)


def test_all_violations_come_at_once_with_their_smallest_cases() -> None:
    def bad(x, *, eps: float = 0.0):
        x.rewards.mul_(2)
        return centred(x) / x.group_std(x.rewards)

    with pytest.raises(ConformanceError) as caught:
        check_estimator(bad)
    assert [violation.rule for violation in caught.value.violations] == [
        "stays finite with a group of one rollout",
        "stays finite when all rewards of a group are equal",
        "leaves its inputs as they are",
    ]
    smallest = "rewards=[0.0], group=[0], lengths=[1], seed=0"
    assert caught.value.violations[0].example == smallest
    assert smallest in str(caught.value)


def test_exception_of_a_component_is_shown_with_its_traceback_only() -> None:
    def bad(x):
        raise KeyError("lost")

    with pytest.raises(ConformanceError) as caught:
        check_estimator(bad)
    text = str(caught.value)
    assert "KeyError: 'lost'" in text
    assert "test_kit_maths.py" in text
    assert "hypothesis" not in text
    assert "rlx/testing" not in text


def good_loss(x, *, clip: float = 0.2):
    clipped = x.ratio.clamp(1 - clip, 1 + clip)
    return LossOutputs(-torch.minimum(x.ratio * x.advantages, clipped * x.advantages))


def reduced(x):
    return good_loss(x).per_token.mean()


def no_gradient(x):
    return good_loss(x).per_token.detach()


def wrong_sign(x):
    return x.ratio * x.advantages


def overflows(x):
    return -(x.logprobs - x.old_logprobs).exp() * x.advantages


def empty_is_nan(x):
    factor = torch.where(x.lengths > 0, 1.0, torch.nan).double().mean()
    return good_loss(x).per_token * factor


def first_token_counts(x):
    return good_loss(x).per_token * (1 + x.step_advantages[:1].abs().sum())


def whitens_the_micro_batch(x):
    return good_loss(x).per_token / x.advantages.abs().sum().clamp(min=1e-3)


def mutates_old_logprobs(x):
    loss = good_loss(x).per_token
    x.old_logprobs.zero_()
    return loss


def random_loss(x):
    return good_loss(x).per_token + 1e-13 * torch.rand(x.token_count)


def float32_loss(x):
    return good_loss(x).per_token.float()


def process_loss(x):
    return good_loss(x).per_token * (2 if IN_CHILD else 1)


def unplain_loss(x, *, scale: object = object()):
    return good_loss(x)


LOSSES = {
    "returns [N] numbers": reduced,
    "has a gradient": no_gradient,
    "raises the probability of tokens with a positive advantage, lowers it with a negative one": (
        wrong_sign
    ),
    "stays finite at extreme log-ratios, value and gradient": overflows,
    "stays finite when a rollout has no action tokens": empty_is_nan,
    "does not depend on the order of the rollouts": first_token_counts,
    "has the same gradient in one micro-batch and in several": whitens_the_micro_batch,
    "leaves its inputs as they are": mutates_old_logprobs,
    "is deterministic": random_loss,
    "keeps float64": float32_loss,
    "resolves in another process to the same component": process_loss,
    "parameters survive config.yaml": unplain_loss,
}


def test_right_loss_passes() -> None:
    check_loss(good_loss, examples=EXAMPLES)
    check_loss(good_loss, examples=EXAMPLES, clip=0.01)


@pytest.mark.parametrize("rule", LOSSES)
def test_wrong_loss_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_loss, LOSSES[rule]) == [rule]


def looks_at_old_logprobs_of_the_step(x):
    known = x.step_old_logprobs.nan_to_num(posinf=0.0, neginf=0.0)
    return good_loss(x).per_token * (2 + known.mean().tanh())


@rlx.component(requires={"old_logprobs"})
def requires_old_logprobs(x):
    return looks_at_old_logprobs_of_the_step(x)


def test_loss_gets_old_logprobs_of_the_step_only_where_it_requires_them() -> None:
    with pytest.raises(ConformanceError, match=r'requires=\{"old_logprobs"\}'):
        check_loss(looks_at_old_logprobs_of_the_step, examples=EXAMPLES)
    check_loss(requires_old_logprobs, examples=EXAMPLES)


def good_correction(x, *, high: float = 2.0):
    return x.ratio.clamp(max=high)


def per_rollout(x):
    return x.sequence_mean(x.ratio)


def negative(x):
    return 2 * good_correction(x) - 1


def half(x):
    return good_correction(x) / 2


def unbounded(x):
    return (x.old_logprobs - x.rollout_logprobs).exp()


def nan_when_empty(x):
    factor = torch.where(x.lengths > 0, 1.0, torch.nan).double().mean()
    return good_correction(x) * factor


def normalised_over_the_batch(x):
    weights = good_correction(x)
    return weights * weights.numel() / weights.sum().clamp(min=1e-3)


def mutates_logprobs(x):
    weights = good_correction(x)
    x.rollout_logprobs.zero_()
    return weights


def random_weights(x):
    return good_correction(x) + 1e-13 * torch.rand(x.token_count)


def float32_weights(x):
    return good_correction(x).float()


def process_weights(x):
    return good_correction(x) ** (2 if IN_CHILD else 1)


def unplain_correction(x, *, scale: object = object()):
    return good_correction(x)


CORRECTIONS = {
    "returns [N] weights": per_rollout,
    "returns no negative weights": negative,
    "returns 1 where engine and learner agree": half,
    "stays finite at extreme differences": unbounded,
    "stays finite when a rollout has no action tokens": nan_when_empty,
    "gives a rollout the same weights whatever else is in the micro-batch": (
        normalised_over_the_batch
    ),
    "leaves its inputs as they are": mutates_logprobs,
    "is deterministic": random_weights,
    "keeps float64": float32_weights,
    "resolves in another process to the same component": process_weights,
    "parameters survive config.yaml": unplain_correction,
}


def test_right_correction_passes() -> None:
    check_correction(good_correction, examples=EXAMPLES)


@pytest.mark.parametrize("rule", CORRECTIONS)
def test_wrong_correction_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_correction, CORRECTIONS[rule]) == [rule]
