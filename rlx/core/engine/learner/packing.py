"""Packing: from the sequences of a batch to rows of packed tokens, many rows to a micro-batch.

A row holds several whole sequences one after the other, each with positions that start at 0; the
model reads from the restarts which tokens belong together. Sequences are placed first-fit, longest
first. What is left of a row is one pad sequence of its own, which no other token attends to.

Attention inside a row costs its length squared, foreign sequences included, so rows are only as
long as filling them well takes: twice the longest sequence that is still to be placed.

Legend: B sequences and N action tokens of the batch, R rows of L tokens in a micro-batch,
b sequences and n action tokens in a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.core.engine.batches import ragged_indices
from rlx.core.rollouts import TrainBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One block of packed rows; its action tokens [n] lie in the order of `sequences`."""

    tokens: np.ndarray
    """[R, L] int64."""
    positions: np.ndarray
    """[R, L] int64, restarting at 0 with each sequence."""
    source: np.ndarray
    """[n] int64, index into the flattened rows of the token *before* each action token: the hidden
    state there predicts the action token."""
    targets: np.ndarray
    """[n] int64, ids of the action tokens."""
    sequences: np.ndarray
    """[b] int64, indices of the sequences on the batch's axis [B]."""
    actions: np.ndarray
    """[n] int64, indices of the action tokens on the batch's axis [N]."""
    action_lengths: np.ndarray
    """[b] int64."""

    @property
    def action_count(self) -> int:
        return len(self.targets)


def make_micro_batches(
    batch: TrainBatch, *, row_tokens: int, token_budget: int, packed: bool = True
) -> list[MicroBatch]:
    """Pack the sequences of `batch` that hold action tokens; the others need no forward pass.

    Args:
        row_tokens: most tokens in a row, unless one sequence is longer.
        token_budget: most tokens, pads included, in a micro-batch of more than one row.
        packed: false gives each sequence its own row, for models that read across sequences.
    """
    used = np.flatnonzero(batch.action_lengths)
    blocks = pack(
        batch.lengths[used], row_tokens=row_tokens, token_budget=token_budget, packed=packed
    )
    return [_lay_out(batch, [used[row] for row in block]) for block in blocks]


def pack(
    lengths: np.ndarray, *, row_tokens: int, token_budget: int, packed: bool = True
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each block, first-fit decreasing."""
    waiting = np.argsort(-lengths, kind="stable")
    blocks = []
    while len(waiting):
        longest = int(lengths[waiting[0]])
        width = max(longest, min(row_tokens, 2 * longest)) if packed else longest
        rows, waiting = _fill(lengths, waiting, width, max(1, token_budget // width), packed)
        blocks.append(rows)
    return blocks


def _fill(
    lengths: np.ndarray, waiting: np.ndarray, width: int, most_rows: int, packed: bool
) -> tuple[list[list[int]], np.ndarray]:
    """Fill at most `most_rows` rows; returns them and what is still waiting, longest first."""
    space = np.full(most_rows, width)
    rows: list[list[int]] = []
    placed = np.zeros(len(waiting), bool)
    sorted_lengths = -lengths[waiting]
    place = 0
    while place < len(waiting):
        length = -sorted_lengths[place]
        row = int((space >= length).argmax())
        if space[row] < length:
            # Nothing before the first sequence that fits the widest gap can be placed any more.
            place = max(place + 1, int(np.searchsorted(sorted_lengths, -space.max())))
            continue
        if row == len(rows):
            rows.append([])
        rows[row].append(int(waiting[place]))
        space[row] = space[row] - length if packed else 0
        placed[place] = True
        place += 1
    return rows, waiting[~placed]


def _lay_out(batch: TrainBatch, rows: Sequence[np.ndarray]) -> MicroBatch:
    sequences = np.concatenate(rows)
    lengths = batch.lengths[sequences]
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    width = max(int(batch.lengths[row].sum()) for row in rows)
    starts = np.concatenate([_starts(batch.lengths[row]) for row in rows]) + row_of * width

    within = np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
    place = np.repeat(starts, lengths) + within
    tokens = np.zeros(len(rows) * width, np.int64)
    tokens[place] = batch.tokens[ragged_indices(batch.lengths, sequences)]

    actions = ragged_indices(batch.action_lengths, sequences)
    action_lengths = batch.action_lengths[sequences]
    targets_at = np.repeat(starts, action_lengths) + batch.action_positions[actions]
    return MicroBatch(
        tokens=tokens.reshape(len(rows), width),
        positions=_positions(batch, rows, width),
        source=targets_at - 1,
        targets=tokens[targets_at],
        sequences=sequences,
        actions=actions,
        action_lengths=action_lengths,
    )


def _positions(batch: TrainBatch, rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    positions = np.empty((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        lengths = batch.lengths[row]
        slack = width - int(lengths.sum())
        spans = np.append(lengths, slack) if slack else lengths
        positions[index] = np.arange(width) - np.repeat(_starts(spans), spans)
    return positions


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.cumsum(lengths) - lengths


def idle_micro_batch() -> MicroBatch:
    """A micro-batch without action tokens, for a rank that has less to do than the others."""
    nothing = np.zeros(0, np.int64)
    return MicroBatch(
        tokens=np.zeros((1, 2), np.int64),
        positions=np.arange(2, dtype=np.int64)[None],
        source=nothing,
        targets=nothing,
        sequences=nothing,
        actions=nothing,
        action_lengths=nothing,
    )
