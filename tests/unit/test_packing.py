"""Packing places every token once, whatever the lengths and the budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.engine.learner.packing import make_micro_batches, pack
from rlx.core.rollouts import TrainBatch

shapes = st.lists(
    st.tuples(st.integers(1, 12), st.lists(st.booleans(), max_size=30)), min_size=1, max_size=40
)


def make_batch(shape: list[tuple[int, list[bool]]]) -> TrainBatch:
    """Sequences of a prompt length and, for each later token, whether the policy sampled it."""
    positions = [
        np.flatnonzero([False] * prompt + sampled).astype(np.int64) for prompt, sampled in shape
    ]
    lengths = np.array([prompt + len(sampled) for prompt, sampled in shape], np.int64)
    counts = np.array([len(position) for position in positions], np.int64)
    n = int(counts.sum())
    return TrainBatch(
        tokens=np.arange(lengths.sum(), dtype=np.int32) + 1,
        lengths=lengths,
        action_lengths=counts,
        action_positions=np.concatenate(positions),
        turn=np.zeros(n, np.int64),
        group=np.zeros(len(shape), np.int64),
        rollout_logprobs=np.zeros(n, np.float32),
        rewards=np.zeros(len(shape)),
        token_rewards=np.zeros(n),
    )


@pytest.mark.parametrize(("packed", "whole"), [(True, False), (False, False), (True, True)])
@given(shape=shapes, row_tokens=st.integers(8, 64), budget=st.integers(16, 256))
def test_every_action_token_is_predicted_once_from_the_token_before_it(
    packed: bool, whole: bool, shape: list[tuple[int, list[bool]]], row_tokens: int, budget: int
) -> None:
    batch = make_batch(shape)
    micro_batches = make_micro_batches(
        batch, row_tokens=row_tokens, token_budget=budget, packed=packed, whole=whole
    )
    seen = np.zeros(batch.action_count, np.int64)
    starts = np.cumsum(batch.lengths) - batch.lengths
    truth = np.repeat(starts, batch.action_lengths) + batch.action_positions
    for micro in micro_batches:
        seen[micro.actions] += 1
        flat = micro.tokens.reshape(-1)
        np.testing.assert_array_equal(flat[micro.source], batch.tokens[truth[micro.actions] - 1])
        np.testing.assert_array_equal(micro.targets, batch.tokens[truth[micro.actions]])
        np.testing.assert_array_equal(micro.action_lengths, batch.action_lengths[micro.sequences])
        places = micro.positions.reshape(-1)[micro.source]
        np.testing.assert_array_equal(places, batch.action_positions[micro.actions] - 1)
        assert micro.tokens.shape[0] == 1 or micro.tokens.size <= budget
    assert (seen == 1).all()


@given(shape=shapes, row_tokens=st.integers(8, 64))
def test_positions_restart_exactly_where_sequences_and_pads_start(
    shape: list[tuple[int, list[bool]]], row_tokens: int
) -> None:
    batch = make_batch(shape)
    for micro in make_micro_batches(batch, row_tokens=row_tokens, token_budget=10_000):
        for tokens, positions in zip(micro.tokens, micro.positions, strict=True):
            steps = np.diff(positions)
            assert positions[0] == 0
            assert set(positions[1:][steps != 1]) <= {0}
            bounds = np.append(np.flatnonzero(positions == 0), len(positions))
            for start, stop in itertools.pairwise(bounds):
                piece = tokens[start:stop]
                # Tokens of the batch are numbered through, pads are 0.
                assert (piece == 0).all() or (np.diff(piece) == 1).all()
                assert (piece == 0).all() or piece[0] - 1 in np.cumsum(
                    batch.lengths
                ) - batch.lengths


@pytest.mark.parametrize("packed", [True, False])
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60),
    row_tokens=st.integers(8, 64),
    budget=st.integers(16, 400),
)
def test_blocks_hold_each_sequence_once_within_row_length_and_budget(
    packed: bool, lengths: list[int], row_tokens: int, budget: int
) -> None:
    array = np.array(lengths)
    blocks = pack(array, row_tokens=row_tokens, token_budget=budget, packed=packed)
    placed = [index for block in blocks for row in block for index in row]
    assert sorted(placed) == list(range(len(lengths)))
    for block in blocks:
        longest = max(array[index] for row in block for index in row)
        width = max(array[row].sum() for row in block)
        assert width <= max(row_tokens, longest)
        assert len(block) == 1 or width * len(block) <= budget
        assert packed or all(len(row) == 1 for row in block)


@pytest.mark.parametrize(("low", "high"), [(20, 41), (5, 500), (100, 101)])
def test_little_of_a_micro_batch_is_padding(low: int, high: int) -> None:
    lengths = np.random.default_rng(0).integers(low, high, 256)
    blocks = pack(lengths, row_tokens=512, token_budget=4096)
    padded = sum(len(block) * max(lengths[row].sum() for row in block) for block in blocks)
    assert padded <= 1.15 * lengths.sum()


def test_rows_of_short_sequences_are_short() -> None:
    lengths = np.array([400] + [10] * 600)
    blocks = pack(lengths, row_tokens=512, token_budget=1024)
    widths = [max(int(lengths[row].sum()) for row in block) for block in blocks]
    assert widths[0] == 510
    assert widths[-1] == 20


def test_tokens_that_predict_no_action_token_are_laid_out_on_demand_only() -> None:
    batch = make_batch([(2, [True, True, False]), (3, [True])])
    settings = {"row_tokens": 64, "token_budget": 64}
    (micro,) = make_micro_batches(batch, **settings)
    assert sorted(micro.tokens[micro.tokens > 0]) == [1, 2, 3, 6, 7, 8]
    (whole,) = make_micro_batches(batch, **settings, whole=True)
    assert sorted(whole.tokens[whole.tokens > 0]) == [*range(1, 10)]


def test_batch_without_action_tokens_needs_no_micro_batch() -> None:
    assert make_micro_batches(make_batch([(4, [])]), row_tokens=8, token_budget=16) == []
