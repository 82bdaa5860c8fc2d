"""Common prefixes are found, and flat rows hold every token where it belongs."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.engine.learner.flat_packing import first_fit, make_flat_micro_batches
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.engine.learner.prefixes import find_trees
from rlx.core.rollouts import TrainBatch

families = st.lists(
    st.lists(st.lists(st.integers(1, 3), min_size=2, max_size=9), min_size=1, max_size=6),
    min_size=1,
    max_size=5,
)
"""Groups of sequences over three token ids, so that most begin alike."""


def make_batch(groups: list[list[list[int]]], sampled: float = 1.0) -> TrainBatch:
    """Sequences of which a part `sampled` of the tokens, the first one excepted, are actions."""
    rng = np.random.default_rng(0)
    rows = [np.array(row, np.int32) for group in groups for row in group]
    positions = [1 + np.flatnonzero(rng.random(len(row) - 1) < sampled) for row in rows]
    n = sum(len(one) for one in positions)
    return TrainBatch(
        tokens=np.concatenate(rows),
        lengths=np.array([len(row) for row in rows], np.int64),
        action_lengths=np.array([len(one) for one in positions], np.int64),
        action_positions=np.concatenate(positions).astype(np.int64),
        turn=np.zeros(n, np.int64),
        group=np.repeat(np.arange(len(groups)), [len(group) for group in groups]),
        rollout_logprobs=np.zeros(n, np.float32),
        rewards=np.zeros(len(rows)),
        token_rewards=np.zeros(n),
    )


def paths(micro: MicroBatch) -> list[list[int]]:
    """For each token of the row the places of all tokens that it reads, itself last."""
    assert micro.layout is not None
    own = {}
    for start, stop in micro.layout.spans.tolist():
        for place in range(start, stop):
            own[place] = list(range(start, place + 1))
    for start, stop, end in micro.layout.stems.tolist():
        for place in range(stop, end):
            own[place] = [*range(start, stop), *own[place]]
    return [own[place] for place in range(micro.tokens.shape[1])]


@given(groups=families, budget=st.integers(8, 80), worth=st.sampled_from([None, 1, 5]))
def test_every_action_token_is_predicted_from_all_tokens_before_it(
    groups: list[list[list[int]]], budget: int, worth: int | None
) -> None:
    batch = make_batch(groups, sampled=0.6)
    starts = np.cumsum(batch.lengths) - batch.lengths
    owner = np.repeat(np.arange(len(batch.lengths)), batch.action_lengths)
    seen = np.zeros(batch.action_count, np.int64)
    for micro in make_flat_micro_batches(batch, token_budget=budget, worth=worth):
        seen[micro.actions] += 1
        (flat,), (positions,) = micro.tokens, micro.positions
        reads = paths(micro)
        for action, source, target in zip(micro.actions, micro.source, micro.targets, strict=True):
            first = starts[owner[action]]
            before = batch.tokens[first : first + batch.action_positions[action]]
            np.testing.assert_array_equal(flat[reads[source]], before)
            np.testing.assert_array_equal(positions[reads[source]], np.arange(len(before)))
            assert target == batch.tokens[first + batch.action_positions[action]]
        np.testing.assert_array_equal(micro.action_lengths, batch.action_lengths[micro.sequences])
        assert len(flat) <= max(budget, batch.lengths[micro.sequences].max())
    assert (seen == 1).all()


def test_a_prompt_stands_once_however_many_rollouts_go_on_from_it() -> None:
    prompt = list(range(1, 21))
    batch = make_batch([[[*prompt, 50 + index, 7, 8] for index in range(6)]])
    (micro,) = make_flat_micro_batches(batch, token_budget=1000, worth=1)
    assert micro.tokens.size == 20 + 6 * 2
    assert micro.layout is not None
    assert micro.layout.stems.tolist() == [[0, 20, 32]]
    (apart,) = make_flat_micro_batches(batch, token_budget=1000, worth=None)
    assert apart.tokens.size == 6 * 22


def test_sharing_less_than_is_worth_it_is_left_out() -> None:
    batch = make_batch([[[1, 2, 3, 50 + index, 9] for index in range(4)]])
    (shared,) = make_flat_micro_batches(batch, token_budget=1000, worth=9)
    (apart,) = make_flat_micro_batches(batch, token_budget=1000, worth=10)
    assert (shared.tokens.size, apart.tokens.size) == (16 - 9, 16)


def test_a_group_larger_than_a_micro_batch_has_its_prompt_in_each() -> None:
    prompt = list(range(1, 21))
    batch = make_batch([[[*prompt, 50 + index, 7, 8] for index in range(6)]])
    sizes = [
        micro.tokens.size for micro in make_flat_micro_batches(batch, token_budget=27, worth=1)
    ]
    assert sizes == [26, 26]


def test_tokens_that_predict_no_action_token_are_laid_out_on_demand_only() -> None:
    batch = dataclasses.replace(
        make_batch([[[1, 2, 3, 4, 5, 6], [1, 2, 7, 8]]]),
        action_lengths=np.array([2, 1]),
        action_positions=np.array([2, 3, 2]),
    )
    (micro,) = make_flat_micro_batches(batch, token_budget=1000, worth=None)
    assert micro.tokens.tolist() == [[1, 2, 3, 1, 2]]
    assert micro.targets.tolist() == [3, 4, 7]
    (whole,) = make_flat_micro_batches(batch, token_budget=1000, worth=None, whole=True)
    assert whole.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 1, 2, 7, 8]]
    assert whole.targets.tolist() == [3, 4, 7]


def test_other_groups_share_nothing() -> None:
    batch = make_batch([[[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 6]]])
    (micro,) = make_flat_micro_batches(batch, token_budget=1000, worth=1)
    assert micro.tokens.size == 8


def test_segments_share_with_the_segments_that_begin_like_them() -> None:
    """Two rollouts of two segments each: first segments have one prompt, second ones another."""
    first, second = [1] * 9, [2] * 7
    rows = [[*first, 5], [*second, 6], [*first, 7], [*second, 8]]
    batch = dataclasses.replace(
        make_batch([rows]),
        group=np.zeros(2, np.int64),
        segments=np.array([2, 2]),
        rewards=np.zeros(2),
        action_lengths=np.ones(4, np.int64),
        action_positions=np.array([9, 7, 9, 7]),
    )
    (micro,) = make_flat_micro_batches(batch, token_budget=1000, worth=1)
    assert micro.tokens.size == 8 + 2 + 6 + 2


@given(family=families.map(lambda groups: [row for group in groups for row in group]))
def test_trees_save_at_least_what_one_tree_or_none_would(family: list[list[int]]) -> None:
    rows = [np.array(row) for row in family]
    trees = find_trees(lambda index: rows[index], range(len(rows)), worth=1)
    assert sorted(itertools.chain(*(tree.sequences for tree in trees))) == list(range(len(rows)))
    for tree in trees:
        parts = {tuple(rows[index][: tree.prefix]) for index in tree.sequences}
        assert len(parts) == 1
        assert all(len(rows[index]) > tree.prefix for index in tree.sequences)
    common = 0
    while all(len(row) > common + 1 and row[common] == rows[0][common] for row in rows):
        common += 1
    saved = sum(tree.prefix * (len(tree.sequences) - 1) for tree in trees)
    assert saved >= common * (len(rows) - 1)


@pytest.mark.parametrize("seed", range(5))
def test_first_fit_fills_bins_within_their_capacity(seed: int) -> None:
    sizes = np.random.default_rng(seed).integers(1, 60, 50)
    bins = first_fit(sizes, 50)
    assert sorted(itertools.chain(*bins)) == list(range(50))
    assert all(sizes[one].sum() <= 50 or len(one) == 1 for one in bins)
    assert len(bins) <= 1.3 * sum(min(int(size), 50) for size in sizes) / 50 + 1
