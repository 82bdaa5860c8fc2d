"""Ragged maths against loops over lists of lists."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.core import ragged
from rlx.core.errors import ComponentError, UsageError
from rlx.core.inputs import MissingInputError
from rlx.testing.inputs import correction_inputs, estimator_inputs, loss_inputs

number = st.floats(-100, 100)
sequences = st.lists(st.lists(number, max_size=7), min_size=1, max_size=5)
grouped = st.lists(st.tuples(st.integers(0, 3), number), min_size=1, max_size=10)


def flat(rollouts: list[list[float]]) -> tuple[torch.Tensor, torch.Tensor]:
    values = [value for rollout in rollouts for value in rollout]
    lengths = [len(rollout) for rollout in rollouts]
    return torch.tensor(values, dtype=torch.float64), torch.tensor(lengths)


@settings(max_examples=60)
@given(sequences)
def test_sequence_sum_and_mean(rollouts: list[list[float]]) -> None:
    values, lengths = flat(rollouts)
    sums = [sum(rollout) for rollout in rollouts]
    means = [sum(r) / len(r) if r else 0.0 for r in rollouts]
    assert ragged.sequence_sum(values, lengths).tolist() == pytest.approx(sums)
    assert ragged.sequence_mean(values, lengths).tolist() == pytest.approx(means)


@settings(max_examples=60)
@given(sequences, st.floats(-9, 9))
def test_next_token_stays_within_the_rollout(rollouts: list[list[float]], fill: float) -> None:
    values, lengths = flat(rollouts)
    expected = [v for r in rollouts for v in ([*r[1:], fill] if r else [])]
    assert ragged.next_token(values, lengths, fill).tolist() == expected


@settings(max_examples=60)
@given(sequences, st.sampled_from([0.0, 0.5, 0.99, 1.0]))
def test_discounted_sum(rollouts: list[list[float]], gamma: float) -> None:
    values, lengths = flat(rollouts)
    expected: list[float] = []
    for rollout in rollouts:
        running, out = 0.0, []
        for value in reversed(rollout):
            running = value + gamma * running
            out.insert(0, running)
        expected += out
    assert ragged.discounted_sum(values, lengths, gamma).tolist() == pytest.approx(expected)


def test_discounted_sum_of_long_rollouts_is_accurate_in_float32() -> None:
    lengths = torch.tensor([4097, 0, 1, 1000])
    values = torch.full((5098,), 0.1)
    found = ragged.discounted_sum(values, lengths, 1.0)
    exact = ragged.discounted_sum(values.double(), lengths, 1.0)
    assert (found - exact).abs().max() < 1e-3
    assert found[0].item() == pytest.approx(409.7, rel=1e-5)


@settings(max_examples=60)
@given(grouped)
def test_group_statistics(rollouts: list[tuple[int, float]]) -> None:
    names, rewards = zip(*rollouts, strict=True)
    x = estimator_inputs(rewards=list(rewards), group=[10 - name for name in names])
    R = x.rewards
    for i, name in enumerate(names):
        members = torch.tensor([r for n, r in rollouts if n == name], dtype=torch.float64)
        others = torch.tensor(
            [r for j, (n, r) in enumerate(rollouts) if n == name and j != i], dtype=torch.float64
        )
        spread = members.std().item() if len(members) > 1 else 0.0
        assert x.group_sum(R)[i].item() == pytest.approx(members.sum().item(), abs=1e-9)
        assert x.group_mean(R)[i].item() == pytest.approx(members.mean().item(), abs=1e-9)
        assert x.group_std(R)[i].item() == pytest.approx(spread, abs=1e-7)
        assert x.group_max(R)[i].item() == members.max().item()
        assert x.group_size[i].item() == len(members)
        alone = others.mean().item() if len(others) else R[i].item()
        assert x.leave_one_out_mean(R)[i].item() == pytest.approx(alone, abs=1e-9)
    assert x.group_count == len(set(names))


@pytest.mark.parametrize("value", [0.1, 1 / 3, 1e-30, -7.7])
def test_mean_of_a_constant_group_is_exact(value: float) -> None:
    x = estimator_inputs(rewards=[value] * 7, group=[0, 0, 0, 1, 1, 1, 1])
    assert torch.equal(x.group_mean(x.rewards), x.rewards)
    assert torch.equal(x.leave_one_out_mean(x.rewards), x.rewards)
    assert x.group_std(x.rewards).tolist() == [0.0] * 7


def test_whitening_bounds_the_variance_from_below() -> None:
    values = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert ragged.whiten(values).tolist() == pytest.approx([-1.0, 1.0])
    assert ragged.whiten(values, scale=False).tolist() == [-1.0, 1.0]
    tiny = torch.tensor([0.0, 2e-6], dtype=torch.float64)
    assert ragged.whiten(tiny).tolist() == pytest.approx([-1e-2, 1e-2])
    assert ragged.whiten(values[:1]).tolist() == [0.0]
    assert ragged.whiten(values[:0]).tolist() == []


def test_batch_statistics_of_few_values() -> None:
    x = estimator_inputs(rewards=[1.0, 3.0])
    assert x.batch_mean(x.rewards).item() == 2.0
    assert x.batch_std(x.rewards).item() == pytest.approx(2**0.5)
    assert x.batch_std(x.rewards[:1]).item() == 0.0
    assert x.batch_mean(x.rewards[:0]).item() == 0.0


@pytest.mark.parametrize(
    ("given_dtype", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_low_precision_inputs_are_computed_in_float32(
    given_dtype: torch.dtype, computed: torch.dtype
) -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=given_dtype, requires_grad=True)
    x = loss_inputs(logprobs=logprobs, advantages=torch.ones(2, dtype=given_dtype))
    assert x.logprobs.dtype == x.ratio.dtype == x.advantages.dtype == computed
    x.ratio.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.dtype == given_dtype


def test_input_that_is_not_required_names_the_tag_to_ask_for() -> None:
    x = estimator_inputs(rewards=[1.0])
    with pytest.raises(ComponentError, match=r'requires=\{"values"\}'):
        _ = x.values
    with pytest.raises(MissingInputError, match="greedy=True"):
        _ = x.greedy_rewards
    assert not hasattr(x, "values")
    assert not x.has("values")
    assert x.get("values") is None
    assert x.replace(values=torch.ones(1)).values.tolist() == [1.0]


def test_inputs_are_frozen_and_picklable() -> None:
    x = correction_inputs(old_logprobs=[-1.0], rollout_logprobs=[-1.5])
    with pytest.raises(dataclasses.FrozenInstanceError):
        x.old_logprobs = torch.zeros(1)  # type: ignore[misc]
    again = pickle.loads(pickle.dumps(x))
    assert torch.equal(again.ratio, x.ratio)
    assert "old_logprobs" in repr(x)


def test_rewards_lie_on_the_last_action_token_unless_given() -> None:
    x = estimator_inputs(rewards=[1.0, 2.0, 3.0], lengths=[2, 0, 1])
    assert x.token_rewards.tolist() == [0.0, 1.0, 3.0]
    assert x.kl_rewards.tolist() == [0.0, 0.0, 0.0]
    assert x.to_tokens(x.rewards).tolist() == [1.0, 1.0, 3.0]


def test_lengths_that_do_not_fit_are_refused() -> None:
    with pytest.raises(UsageError, match="add up to 3"):
        loss_inputs(logprobs=[-1.0, -1.0], advantages=[1.0, 1.0], lengths=[3])
    with pytest.raises(UsageError, match="advantages has shape"):
        loss_inputs(logprobs=[-1.0, -1.0], advantages=[1.0])
    with pytest.raises(UsageError, match="values has shape"):
        estimator_inputs(rewards=[1.0], lengths=[2], values=[0.0])
