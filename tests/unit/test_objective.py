"""The objective: reductions, independence of the micro-batches, extreme inputs, metrics."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest
import torch

from rlx.core.component import component
from rlx.core.errors import ComponentError, UsageError
from rlx.core.inputs import CorrectionInputs, LossInputs, LossOutputs
from rlx.core.objective import (
    AGGREGATIONS,
    Denominators,
    MetricSums,
    Objective,
    ObjectiveSettings,
    policy_objective,
)
from rlx.core.ragged import Tensor
from rlx.testing.inputs import loss_inputs

NAMES = [
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "gmpo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
]
LENGTHS = [3, 0, 1, 6, 2, 4, 4]  # 20 tokens
PER_TOKEN = (
    "logprobs",
    "old_logprobs",
    "advantages",
    "rollout_logprobs",
    "ref_logprobs",
    "entropy",
)


def loss_named(name: str) -> Any:
    function = getattr(importlib.import_module(f"rlx.plugins.losses.{name}"), name)
    params = {"clip_cov": {"fraction": 0.25, "cov_low": 0.0}, "kl_cov": {"fraction": 0.25}}

    def loss(x: LossInputs) -> Any:
        return function(x, **params.get(name, {}))

    return loss


def correction_named(name: str) -> Any:
    module = importlib.import_module(f"rlx.plugins.corrections.{name}")
    return getattr(module, name)


def tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    n = sum(LENGTHS)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(n, generator=generator, dtype=torch.float64)

    old = -2 + noise(0.5)
    return {
        "logprobs": old + noise(0.3),
        "old_logprobs": old,
        "advantages": noise(1.0),
        "rollout_logprobs": old + noise(0.4),
        "ref_logprobs": old + noise(0.5),
        "entropy": noise(1.0) ** 2,
    }


def batch(values: dict[str, Tensor], rollouts: list[int] | None = None) -> LossInputs:
    """The given rollouts as one micro-batch of the step."""
    rollouts = list(range(len(LENGTHS))) if rollouts is None else rollouts
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    index = torch.tensor(
        [t for i in rollouts for t in range(starts[i], starts[i] + LENGTHS[i])], dtype=torch.int64
    )
    return loss_inputs(
        lengths=[LENGTHS[i] for i in rollouts],
        step_old_logprobs=values["old_logprobs"].detach(),
        step_advantages=values["advantages"],
        **{name: values[name][index] for name in PER_TOKEN},
    )


def settings_of(aggregation: str, **changes: Any) -> ObjectiveSettings:
    base = {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.05, "sequence_norm": 8}
    return ObjectiveSettings(aggregation=aggregation, **{**base, **changes})


TOTAL = Denominators(tokens=sum(LENGTHS), sequences=len(LENGTHS))


def gradient_of(
    parts: list[list[int]],
    values: dict[str, Tensor],
    denominators: Denominators = TOTAL,
    **how: Any,
) -> tuple[Tensor, Tensor, Tensor, MetricSums]:
    """Loss and gradients of a step that is split into these micro-batches."""
    leaves = {name: values[name].clone().requires_grad_() for name in ("logprobs", "entropy")}
    metrics, loss = MetricSums(), torch.zeros((), dtype=torch.float64)
    for rollouts in parts:
        x = batch({**values, **leaves}, rollouts)
        objective = policy_objective(x, denominators=denominators, **how)
        metrics.add(objective)
        loss = loss + objective.loss
    by_logprob, by_entropy = torch.autograd.grad(
        loss, list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    return loss.detach(), by_logprob, by_entropy, metrics


WHOLE = [list(range(7))]
SPLITS = [
    [[0], [1], [2], [3], [4], [5], [6]],
    [[6, 2], [4, 1, 0], [5, 3]],
    [[1], [3, 6, 0, 5, 4, 2]],
]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_does_not_depend_on_the_micro_batches(name: str, aggregation: str) -> None:
    for correction in ("tis", "seq_mask_tis"):
        how = {
            "loss": loss_named(name),
            "correction": correction_named(correction),
            "settings": settings_of(aggregation),
        }
        values = tensors()
        whole = gradient_of(WHOLE, values, **how)
        assert whole[1].abs().max() > 1e-4
        expected = whole[3].metrics()
        for split in SPLITS:
            found = gradient_of(split, values, **how)
            for mine, theirs in zip(found[:3], whole[:3], strict=True):
                assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-13)
            assert found[3].metrics() == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", NAMES)
def test_batch_twice_over_twice_the_denominator_is_the_same_step(
    name: str, aggregation: str
) -> None:
    how = {
        "loss": loss_named(name),
        "correction": correction_named("icepop"),
        "settings": settings_of(aggregation),
    }
    values = tensors(1)
    once = gradient_of(WHOLE, values, **how)
    twice = gradient_of([WHOLE[0], WHOLE[0]], values, Denominators(tokens=40, sequences=14), **how)
    for mine, theirs in zip(twice[:3], once[:3], strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-10, atol=1e-13)


def test_ranking_losses_choose_the_same_tokens_of_a_doubled_step() -> None:
    values = tensors(2)
    x = batch(values)
    doubled = x.replace(
        step_old_logprobs=x.step_old_logprobs.repeat(2), step_advantages=x.step_advantages.repeat(2)
    )
    for name, key in (("clip_cov", "cov_clip_rate"), ("kl_cov", "cov_penalty_rate")):
        loss = loss_named(name)
        assert loss(x).metrics[key].any()
        assert torch.equal(loss(x).metrics[key], loss(doubled).metrics[key])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token-mean", (1 + 2 + 6) / 3),
        ("seq-mean-token-mean", (1.5 + 0 + 6) / 3),
        ("seq-mean-token-sum-norm", (3 + 0 + 6) / (3 * 10)),
    ],
)
def test_aggregations_are_their_formulas(aggregation: str, expected: float) -> None:
    x = loss_inputs(logprobs=[0.0, 0.0, 0.0], advantages=[1.0, 2.0, 6.0], lengths=[2, 0, 1])
    found = objective_of(
        x, lambda x: x.advantages * x.ratio, settings_of(aggregation, sequence_norm=10)
    )
    assert found.loss.item() == pytest.approx(expected)


def objective_of(
    x: LossInputs, loss: Any, settings: ObjectiveSettings | None = None, correction: Any = None
) -> Objective:
    return policy_objective(
        x,
        loss=loss,
        correction=correction,
        settings=settings or ObjectiveSettings(aggregation="token-mean"),
        denominators=Denominators(tokens=x.token_count, sequences=x.sequence_count),
    )


def metrics_of(objective: Objective) -> dict[str, float]:
    sums = MetricSums()
    sums.add(objective)
    return sums.metrics()


def zero_loss(x: LossInputs) -> Any:
    return 0 * x.logprobs


def test_kl_and_entropy_are_added_by_the_core() -> None:
    x = loss_inputs(
        logprobs=[-1.0, -2.0], advantages=[1.0, 1.0], ref_logprobs=[-1.5, -2.0], entropy=[2.0, 4.0]
    )
    settings = ObjectiveSettings(
        aggregation="token-mean", kl_coef=0.5, kl_estimator="k1", entropy_coef=0.1
    )
    found = objective_of(x, zero_loss, settings)
    assert found.loss.item() == pytest.approx(0.5 * 0.25 - 0.1 * 3.0)
    assert metrics_of(found)["policy/kl_ref"] == pytest.approx(0.25)
    assert metrics_of(found)["policy/entropy"] == pytest.approx(3.0)


def test_kl_in_the_reward_is_only_measured() -> None:
    x = loss_inputs(logprobs=[-1.0], advantages=[1.0], ref_logprobs=[-1.5])
    settings = ObjectiveSettings(
        aggregation="token-mean", kl_coef=0.5, kl_estimator="k1", kl_in_loss=False
    )
    found = objective_of(x, zero_loss, settings)
    assert found.loss.item() == 0.0
    assert metrics_of(found)["policy/kl_ref"] == pytest.approx(0.5)


def test_correction_weights_the_surrogate_and_not_kl_or_entropy() -> None:
    x = loss_inputs(
        logprobs=[-1.0], advantages=[1.0], rollout_logprobs=[-1.0 - math.log(3)], entropy=[2.0]
    )
    settings = ObjectiveSettings(aggregation="token-mean", entropy_coef=0.5)
    found = objective_of(x, lambda x: x.logprobs, settings, correction=lambda c: c.ratio)
    assert found.loss.item() == pytest.approx(3 * -1.0 - 0.5 * 2.0)
    found.loss.backward()
    assert x.logprobs.grad is not None
    assert x.logprobs.grad.item() == pytest.approx(3.0)


def test_masked_token_with_an_infinite_surrogate_adds_nothing() -> None:
    x = loss_inputs(logprobs=[-1.0, -2.0], advantages=[1.0, 1.0], rollout_logprobs=[-1.0, -9.0])

    def unbounded(x: LossInputs) -> Any:
        return torch.where(x.logprobs < -1.5, torch.full_like(x.logprobs, torch.inf), x.logprobs)

    found = objective_of(x, unbounded, correction=correction_named("icepop"))
    found.loss.backward()
    assert found.loss.item() == pytest.approx(-0.5)
    assert x.logprobs.grad is not None
    assert x.logprobs.grad.tolist() == [0.5, 0.0]


def test_weights_that_are_not_finite_count_as_masked() -> None:
    x = loss_inputs(logprobs=[-1.0, -1.0], advantages=[1.0, 1.0], rollout_logprobs=[-1.0, -1.0])
    bad = torch.tensor([math.nan, 1.0], dtype=torch.float64)
    found = objective_of(x, lambda x: x.logprobs, correction=lambda c: bad)
    assert found.loss.item() == -0.5
    assert metrics_of(found)["correction/masked_rate"] == 0.5


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "seq_tis", "seq_mask_tis"])
@pytest.mark.parametrize("name", NAMES)
def test_extreme_inputs_leave_value_gradient_and_metrics_finite(name: str, correction: str) -> None:
    bad = torch.tensor([-math.inf, math.nan, -1e4, 0.0, -1.0, -1.0])
    logprobs = torch.tensor([-1.0, -2.0, -1e-4, -1e4, -1e4, 0.0], requires_grad=True)
    for old in (bad, torch.tensor([-1e4, -1.0, -1e4, -1e-4, -1e4, -1.0])):
        x = loss_inputs(
            logprobs=logprobs,
            old_logprobs=old,
            advantages=torch.tensor([1.0, -1.0, 2.0, -3.0, 0.0, -1.0]),
            rollout_logprobs=bad,
            ref_logprobs=bad.flip(0),
            entropy=torch.ones(6),
            lengths=[2, 0, 3, 1],
        )
        for aggregation in AGGREGATIONS:
            found = objective_of(
                x, loss_named(name), settings_of(aggregation), correction_named(correction)
            )
            (gradient,) = torch.autograd.grad(found.loss, logprobs)
            assert found.loss.isfinite()
            assert gradient.isfinite().all()
            assert all(math.isfinite(value) for value in metrics_of(found).values())


def test_metrics_are_their_definitions() -> None:
    x = loss_inputs(
        logprobs=[math.log(0.6), math.log(0.5), math.log(0.2)],
        old_logprobs=[math.log(0.3), math.log(0.5), math.log(0.4)],
        advantages=[1.0, 0.0, 1.0],
        rollout_logprobs=[math.log(0.3), math.log(0.25), math.log(0.4)],
        lengths=[2, 1],
    )
    found = metrics_of(objective_of(x, loss_named("ppo"), correction=correction_named("tis")))
    assert found["policy/ratio_mean"] == pytest.approx((2 + 1 + 0.5) / 3)
    assert found["policy/clip_rate"] == pytest.approx(1 / 3)  # A = 0 is not clipped
    kl_old = (2 - 1 - math.log(2) + 0.5 - 1 + math.log(2)) / 3
    assert found["policy/kl_old"] == pytest.approx(kl_old)
    assert found["mismatch/logprob_abs_mean"] == pytest.approx(math.log(2) / 3)
    assert found["mismatch/logprob_abs_max"] == pytest.approx(math.log(2))
    assert found["mismatch/kl"] == pytest.approx((2 - 1 - math.log(2)) / 3)
    assert found["mismatch/nonfinite_rate"] == 0.0
    assert found["correction/clipped_rate"] == 0.0
    assert found["policy/loss"] == pytest.approx((-1.2 + 0 - 0.5) / 3)


@pytest.mark.parametrize(
    ("name", "clipped", "masked"),
    [
        ("none", 0.0, 0.0),
        ("tis", 0.25, 0.0),
        ("icepop", 0.0, 0.25),
        ("seq_tis", 0.5, 0.0),
        ("seq_mask_tis", 0.25, 0.0),
    ],
)
def test_correction_rates(name: str, clipped: float, masked: float) -> None:
    x = loss_inputs(
        logprobs=[-1.0] * 4,
        advantages=[1.0] * 4,
        rollout_logprobs=[-1.0 - math.log(9), -1.0, -1.0, -1.0 - math.log(2)],
        lengths=[2, 2],
    )
    found = metrics_of(objective_of(x, loss_named("reinforce"), correction=correction_named(name)))
    assert found["correction/clipped_rate"] == clipped
    assert found["correction/masked_rate"] == masked


def test_mismatch_is_measured_on_the_learner_when_old_is_the_engines() -> None:
    x = loss_inputs(logprobs=[-1.0], old_logprobs=[-1.5], advantages=[1.0], rollout_logprobs=[-1.5])
    settings = ObjectiveSettings(aggregation="token-mean", old_from_rollout=True)
    found = metrics_of(objective_of(x, loss_named("ppo"), settings))
    assert found["mismatch/logprob_abs_mean"] == pytest.approx(0.5)


def test_loss_of_a_step_is_logged_whatever_its_number_of_updates() -> None:
    values = tensors()
    how = {
        "loss": loss_named("ppo"),
        "correction": None,
        "settings": ObjectiveSettings(aggregation="token-mean"),
    }
    loss, _, _, metrics = gradient_of(SPLITS[1], values, **how)
    assert metrics.metrics()["policy/loss"] == pytest.approx(loss.item())
    metrics.add(gradient_of(WHOLE, values, **how)[3])  # a second update of the same training step
    assert metrics.metrics()["policy/loss"] == pytest.approx(loss.item())


def test_metrics_of_a_loss_are_averaged_over_their_axis() -> None:
    def chatty(x: LossInputs) -> LossOutputs:
        metrics = {"a": x.advantages, "b": torch.tensor([1.0, 4.0]), "c": torch.tensor(7.0)}
        return LossOutputs(x.ratio * x.advantages, metrics)

    x = loss_inputs(logprobs=[-1.0, -1.0, -1.0], advantages=[1.0, 2.0, 6.0], lengths=[2, 1])
    found = metrics_of(objective_of(x, chatty))
    assert (found["policy/a"], found["policy/b"], found["policy/c"]) == (3.0, 2.5, 7.0)


def test_maxima_are_merged_as_maxima_and_packing_round_trips() -> None:
    values = tensors()
    how = {"loss": loss_named("ppo"), "correction": correction_named("tis")}
    _, _, _, metrics = gradient_of(SPLITS[0], values, settings=settings_of("token-mean"), **how)
    gap = (values["old_logprobs"] - values["rollout_logprobs"]).abs().max()
    assert metrics.metrics()["mismatch/logprob_abs_max"] == pytest.approx(gap.item())
    before = metrics.metrics()
    additive, maxima = metrics.pack()
    metrics.unpack(additive * 2, maxima)  # what two ranks with equal parts all-reduce to
    assert metrics.metrics() == pytest.approx(before)


def test_micro_batch_without_action_tokens_adds_nothing() -> None:
    x = loss_inputs(
        logprobs=[], advantages=[], rollout_logprobs=[], lengths=[0, 0], ref_logprobs=[]
    )
    for name in NAMES:
        found = objective_of(
            x, loss_named(name), settings_of("token-mean"), correction_named("tis")
        )
        found.loss.backward()
        assert found.loss.item() == 0.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda x: x.logprobs.mean(), r"returned shape \[\]"),
        (lambda x: x.logprobs[:1], r"returned shape \[1\].*\[N\] = \[2\]"),
        (lambda x: [0.0, 0.0], "returned list"),
    ],
)
def test_loss_of_another_shape_is_an_error_that_names_it(answer: Any, message: str) -> None:
    answer.__name__ = "mine"
    x = loss_inputs(logprobs=[-1.0, -2.0], advantages=[1.0, 1.0])
    with pytest.raises(ComponentError, match=message) as caught:
        objective_of(x, answer)
    assert "'mine'" in str(caught.value)


def test_unknown_aggregation_suggests_the_nearest() -> None:
    x = loss_inputs(logprobs=[-1.0], advantages=[1.0])
    with pytest.raises(UsageError, match="token-mean"):
        objective_of(x, zero_loss, ObjectiveSettings(aggregation="tokn-mean"))


def test_untagged_correction_is_compared_with_the_token_ratio() -> None:
    def mine(c: CorrectionInputs) -> Any:
        return c.ratio.clamp(max=1.5)

    @component(ratio="sequence")
    def whole(c: CorrectionInputs) -> Any:
        return c.sequence_ratio

    x = loss_inputs(logprobs=[-1.0, -1.0], advantages=[1.0, 1.0], rollout_logprobs=[-2.0, -1.0])
    assert metrics_of(objective_of(x, zero_loss, correction=mine))["correction/clipped_rate"] == 0.5
    assert metrics_of(objective_of(x, zero_loss, correction=whole))["correction/clipped_rate"] == 0
