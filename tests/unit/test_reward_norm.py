"""Running normalisation of rewards: statistics, where the shift goes, state."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rlx.core.engine.reward_norm import RunningNorm
from rlx.core.rollouts import TrainBatch


def batch(rewards: list[float], lengths: list[int], **fields: object) -> TrainBatch:
    """Each rollout's reward on its last action token."""
    tokens = np.zeros(sum(lengths))
    ends = np.cumsum(lengths)
    for reward, length, end in zip(rewards, lengths, ends, strict=True):
        if length:
            tokens[end - 1] = reward
    n = int(ends[-1])
    nothing = np.zeros(n, np.int64)
    plain = TrainBatch(
        tokens=np.zeros(n, np.int32),
        lengths=np.array(lengths),
        action_lengths=np.array(lengths),
        action_positions=nothing,
        turn=nothing,
        group=np.zeros(len(lengths), np.int64),
        rollout_logprobs=np.zeros(n, np.float32),
        rewards=np.array(rewards),
        token_rewards=tokens,
    )
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def test_statistics_are_those_of_all_rewards_so_far() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(50, 3, size) for size in (4, 1, 7)]
    norm = RunningNorm(None)
    for part in parts:
        out = norm.apply(batch(list(part), [2] * len(part)))
    everything = np.concatenate(parts)
    assert norm.mean == pytest.approx(everything.mean())
    assert norm.std == pytest.approx(everything.std(ddof=1))
    expected = (parts[-1] - everything.mean()) / everything.std(ddof=1)
    np.testing.assert_allclose(out.rewards, expected)


def test_tokens_of_a_rollout_add_up_to_its_normalised_reward() -> None:
    norm = RunningNorm(1.0)
    turns = batch([3.0, 1.0, 0.0], [3, 2, 0])
    turns.token_rewards[0] = 5.0  # a turn's reward
    turns.rewards[0] += 5.0
    out = norm.apply(turns)
    sums = [out.token_rewards[:3].sum(), out.token_rewards[3:].sum()]
    np.testing.assert_allclose(sums, out.rewards[:2])
    assert out.token_rewards[0] == pytest.approx(5.0 / norm.std)
    assert out.token_rewards[1] == 0


def test_normalised_rewards_are_clipped() -> None:
    norm = RunningNorm(1.5)
    out = norm.apply(batch([0.0] * 9 + [100.0], [1] * 10))
    assert out.rewards.max() == 1.5
    assert out.token_rewards[-1] == pytest.approx(1.5)


def test_constant_rewards_become_zero() -> None:
    out = RunningNorm(10.0).apply(batch([0.7, 0.7], [1, 1]))
    np.testing.assert_allclose(out.rewards, 0, atol=1e-9)


def test_greedy_rewards_are_measured_alike_but_not_counted() -> None:
    norm = RunningNorm(None)
    out = norm.apply(batch([0.0, 1.0], [1, 1], greedy_rewards=np.array([1.0, 1.0])))
    assert out.greedy_rewards is not None
    np.testing.assert_allclose(out.greedy_rewards, out.rewards[1])
    assert norm.mean == 0.5


def test_state_continues_after_a_restart() -> None:
    first, second = RunningNorm(None), RunningNorm(None)
    first.apply(batch([1.0, 5.0, 2.0], [1, 1, 1]))
    second.load_state_dict(first.state_dict())
    more = batch([9.0, 4.0], [1, 1])
    assert (first.apply(more).rewards == second.apply(more).rewards).all()


def test_batch_itself_is_not_changed() -> None:
    before = batch([1.0, 5.0], [1, 2])
    kept = before.token_rewards.copy()
    RunningNorm(None).apply(before)
    assert (before.token_rewards == kept).all()
