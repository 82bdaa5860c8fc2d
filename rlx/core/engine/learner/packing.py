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
from typing import Protocol

import numpy as np

from rlx.core.flat import ragged_indices


class Packable(Protocol):
    """Sequences on flat axes, as `TrainBatch` describes them."""

    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def lengths(self) -> np.ndarray: ...
    @property
    def action_lengths(self) -> np.ndarray: ...
    @property
    def action_positions(self) -> np.ndarray: ...
    @property
    def action_count(self) -> int: ...
    @property
    def rollout_count(self) -> int: ...
    @property
    def together(self) -> np.ndarray | None:
        """[S] int64: sequences with the same number must share a micro-batch; None: none must."""
        ...

    @property
    def family(self) -> np.ndarray:
        """[S] int64: sequences with the same number may begin with the same tokens. Those that must
        share a micro-batch are a whole family."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Attention in a flat row of T tokens, some of which several sequences have in common.

    A token reads its own span up to itself; a token of a branch also reads all of the stem.
    """

    spans: np.ndarray
    """[k, 2] int64, start and stop of each run of tokens; together they are all T tokens."""
    stems: np.ndarray
    """[t, 3] int64: start of a stem, its stop where its branches start, and their stop."""


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
    layout: Layout | None = None
    """Which tokens read which, of one flat row; None: positions that restart say it."""

    @property
    def action_count(self) -> int:
        return len(self.targets)


def make_micro_batches(
    batch: Packable,
    *,
    row_tokens: int,
    token_budget: int,
    packed: bool = True,
    whole: bool = False,
) -> list[MicroBatch]:
    """Pack the sequences of `batch` that hold action tokens; the others need no forward pass.

    Args:
        row_tokens: most tokens in a row, unless one sequence is longer.
        token_budget: most tokens, pads included, in a micro-batch of more than one row.
        packed: false gives each sequence its own row, for models that read across sequences.
        whole: with the tokens that no log-prob depends on, too.
    """
    used = np.flatnonzero(batch.action_lengths)
    lengths = batch.lengths if whole else read_lengths(batch)
    blocks = pack(
        lengths[used],
        row_tokens=row_tokens,
        token_budget=token_budget,
        packed=packed,
        together=None if batch.together is None else batch.together[used],
    )
    return [_lay_out(batch, lengths, [used[row] for row in block]) for block in blocks]


def read_lengths(batch: Packable) -> np.ndarray:
    """[S] int64: the tokens of each sequence before its last action token. Log-probs of the action
    tokens depend on no others; 0 where there is none."""
    lengths = np.zeros_like(batch.lengths)
    acting = batch.action_lengths > 0
    lengths[acting] = batch.action_positions[np.cumsum(batch.action_lengths)[acting] - 1]
    return lengths


def pack(
    lengths: np.ndarray,
    *,
    row_tokens: int,
    token_budget: int,
    packed: bool = True,
    together: np.ndarray | None = None,
) -> list[list[list[int]]]:
    """Indices of the sequences of each row of each block, first-fit decreasing.

    Args:
        together: number of each sequence; sequences with the same one are in the same block, even
            when that alone is more than the budget.
    """
    if together is not None:
        return _pack_together(lengths, together, row_tokens, token_budget, packed)
    waiting = np.argsort(-lengths, kind="stable")
    blocks = []
    while len(waiting):
        width = _width(int(lengths[waiting[0]]), row_tokens, packed)
        rows, waiting = _fill(lengths, waiting, width, max(1, token_budget // width), packed)
        blocks.append(rows)
    return blocks


def _width(longest: int, row_tokens: int, packed: bool) -> int:
    return max(longest, min(row_tokens, 2 * longest)) if packed else longest


def _pack_together(
    lengths: np.ndarray, together: np.ndarray, row_tokens: int, token_budget: int, packed: bool
) -> list[list[list[int]]]:
    """As `pack`, placing all sequences of a unit or none."""
    units: dict[int, list[int]] = {}
    for index in np.argsort(-lengths, kind="stable"):
        units.setdefault(int(together[index]), []).append(int(index))
    waiting = list(units.values())  # the longest sequence of each comes first, and orders them
    blocks = []
    while waiting:
        width = _width(int(lengths[waiting[0][0]]), row_tokens, packed)
        most_rows = max(1, token_budget // width, _rows_needed(lengths, waiting[0], width, packed))
        space = np.full(most_rows, width)
        rows: list[list[int]] = []
        left = []
        widest = width
        for unit in waiting:
            fits = lengths[unit[0]] <= widest
            places = _places(lengths, unit, space, packed) if fits else None
            if places is None:
                left.append(unit)
                continue
            widest = int(space.max())
            for index, row in zip(unit, places, strict=True):
                if row == len(rows):
                    rows.append([])
                rows[row].append(index)
        blocks.append(rows)
        waiting = left
    return blocks


def _rows_needed(lengths: np.ndarray, unit: list[int], width: int, packed: bool) -> int:
    space = np.full(len(unit), width)
    places = _places(lengths, unit, space, packed)
    assert places is not None  # a row each is enough
    return max(places) + 1


def _places(
    lengths: np.ndarray, unit: list[int], space: np.ndarray, packed: bool
) -> list[int] | None:
    """The row of each sequence, first-fit, taken from `space`; None (and nothing) if one fails."""
    trial = space.copy()
    rows = []
    for index in unit:
        row = int((trial >= lengths[index]).argmax())
        if trial[row] < lengths[index]:
            return None
        trial[row] = trial[row] - lengths[index] if packed else 0
        rows.append(row)
    space[:] = trial
    return rows


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


def _lay_out(batch: Packable, read: np.ndarray, rows: Sequence[np.ndarray]) -> MicroBatch:
    """`read`: [S] tokens of each sequence that are laid out."""
    sequences = np.concatenate(rows)
    lengths = read[sequences]
    row_of = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
    width = max(int(read[row].sum()) for row in rows)
    starts = np.concatenate([_starts(read[row]) for row in rows]) + row_of * width
    first = _starts(batch.lengths)[sequences]

    within = np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
    tokens = np.zeros(len(rows) * width, np.int64)
    tokens[np.repeat(starts, lengths) + within] = batch.tokens[np.repeat(first, lengths) + within]

    actions = ragged_indices(batch.action_lengths, sequences)
    action_lengths = batch.action_lengths[sequences]
    at = batch.action_positions[actions]
    return MicroBatch(
        tokens=tokens.reshape(len(rows), width),
        positions=_positions(read, rows, width),
        source=np.repeat(starts, action_lengths) + at - 1,
        targets=batch.tokens[np.repeat(first, action_lengths) + at].astype(np.int64),
        sequences=sequences,
        actions=actions,
        action_lengths=action_lengths,
    )


def _positions(read: np.ndarray, rows: Sequence[np.ndarray], width: int) -> np.ndarray:
    positions = np.empty((len(rows), width), np.int64)
    for index, row in enumerate(rows):
        lengths = read[row]
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
        layout=Layout(spans=np.array([[0, 2]]), stems=np.zeros((0, 3), np.int64)),
    )
