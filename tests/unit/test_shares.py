"""Batches are shared out evenly, and by whole groups where they share their prompts."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from test_prefixes import make_batch

from rlx.core.engine.shares import batch_shares, largest_differencing, longest_first
from rlx.core.rollouts import TrainBatch


def test_largest_differencing_finds_the_even_split_of_its_paper() -> None:
    """8, 7, 6, 5, 4 differ by 2 under Karmarkar and Karp's method, by 4 under longest first."""
    numbers = np.array([8, 7, 6, 5, 4])

    def gap(parts: list[list[int]]) -> int:
        loads = [numbers[part].sum() for part in parts]
        return int(max(loads) - min(loads))

    assert gap(largest_differencing(numbers, 2)) == 2
    assert gap(longest_first(numbers, 2)) == 4


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 6))
def test_every_rollout_has_one_rank(lengths: list[int], ranks: int) -> None:
    for split in (largest_differencing, longest_first):
        parts = split(np.array(lengths, np.int64), ranks)
        assert len(parts) == ranks
        assert sorted(index for part in parts for index in part) == list(range(len(lengths)))


def groups_of(prompts: list[int], rollouts: int) -> list[list[list[int]]]:
    return [
        [[group + 1] * prompt + [9, 9, index] for index in range(rollouts)]
        for group, prompt in enumerate(prompts)
    ]


def test_groups_stay_whole_where_they_share_their_prompts() -> None:
    batch = _acting(make_batch(groups_of([30, 30, 30, 30], 4)), 30)
    for share in batch_shares(batch, 2, shared_prefix=True):
        assert np.unique(batch.group[share], return_counts=True)[1].tolist() == [4, 4]


def test_one_group_is_cut_where_a_rank_would_have_nothing() -> None:
    batch = _acting(make_batch(groups_of([5], 8)), 5)
    shares = batch_shares(batch, 2, shared_prefix=True)
    assert [len(share) for share in shares] == [4, 4]


def _acting(batch: TrainBatch, prompt: int) -> TrainBatch:
    """The last three tokens of each sequence are its actions."""
    count = len(batch.lengths)
    return dataclasses.replace(
        batch,
        action_lengths=np.full(count, 3),
        action_positions=np.tile(prompt + np.arange(3), count),
    )
