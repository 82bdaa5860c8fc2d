"""Flat arrays of a batch: layout, shares, and that shares put together are the batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.engine.batches import make_batch, take, total_reward
from rlx.core.engine.shares import balanced_shares
from rlx.core.flat import ragged_indices
from rlx.core.rollouts import Group, Rollout, Span, Task

TASK = Task(id="t/0", prompt="p", tokens=(1, 2), label="x")


def rollout(tokens: list[int], spans: list[tuple[int, int, float]], reward: float, index: int = 0):
    spans_ = tuple(
        Span(start=a, stop=b, version=3, finish_reason="stop", reward=r) for a, b, r in spans
    )
    count = sum(b - a for a, b, _ in spans)
    return Rollout(
        task=TASK,
        group_id=0,
        index=index,
        tokens=np.array(tokens, np.int32),
        spans=spans_,
        logprobs=-np.arange(1, count + 1, dtype=np.float32),
        text="",
        finish_reason="stop",
        reward=reward,
    )


def two_groups() -> list[Group]:
    single = rollout([1, 2, 10, 11], [(2, 4, 0.0)], 1.0)
    turns = rollout([1, 2, 20, 5, 6, 21, 22], [(2, 3, 0.25), (5, 7, 0.5)], 2.0, index=1)
    empty = rollout([1, 2], [], 0.0)
    return [
        Group(id=7, task=TASK, rollouts=[single, turns]),
        Group(id=9, task=TASK, rollouts=[empty]),
    ]


def test_batch_lays_sequences_one_after_the_other():
    batch = make_batch(two_groups())
    assert batch.tokens.tolist() == [1, 2, 10, 11, 1, 2, 20, 5, 6, 21, 22, 1, 2]
    assert batch.lengths.tolist() == [4, 7, 2]
    assert batch.action_lengths.tolist() == [2, 3, 0]
    assert batch.action_positions.tolist() == [2, 3, 2, 5, 6]
    assert batch.turn.tolist() == [0, 0, 0, 1, 1]
    assert batch.group.tolist() == [0, 0, 1]


def test_turn_rewards_lie_on_the_last_token_of_their_turn():
    batch = make_batch(two_groups())
    assert batch.token_rewards.tolist() == [0.0, 1.0, 0.25, 0.0, 2.5]
    assert batch.rewards.tolist() == [1.0, 2.75, 0.0]
    assert total_reward(two_groups()[0].rollouts[1]) == 2.75


def test_take_reorders_every_axis():
    batch = make_batch(two_groups())
    part = take(batch, np.array([2, 1]))
    assert part.tokens.tolist() == [1, 2, 1, 2, 20, 5, 6, 21, 22]
    assert part.action_positions.tolist() == [2, 5, 6]
    assert part.rollout_logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert part.advantages is None


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 5))
def test_shares_partition_the_batch_and_are_balanced(lengths: list[int], ranks: int):
    shares = balanced_shares(np.array(lengths), ranks)
    assert sorted(np.concatenate(shares).tolist()) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.randoms())
def test_ragged_indices_equal_slicing(lengths: list[int], random):
    flat = np.arange(sum(lengths))
    pieces = np.split(flat, np.cumsum(lengths)[:-1])
    order = list(range(len(lengths)))
    random.shuffle(order)
    expected = np.concatenate([pieces[i] for i in order])
    assert flat[ragged_indices(np.array(lengths), np.array(order))].tolist() == expected.tolist()
