"""Rows of data as flat token arrays: a whole data set, an optimizer step's batch, a rank's share.

Legend: R rows, S sequences (R, or 2R for pairs), T tokens, N trained tokens. The sequences of a row
lie one after the other, of a pair the chosen one first.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.core.flat import ragged_indices

_PER_TOKEN = ("tokens",)
_PER_SEQUENCE = ("lengths", "action_lengths")
_PER_ACTION = ("action_positions", "turn", "labels", "ref_logprobs")
_PER_ROW = ("margin", "desirable", "number", "source")


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBatch:
    """Sequences with the tokens in them that are trained; what learners and scorers are given."""

    tokens: np.ndarray
    """[T] int32, all sequences concatenated."""
    lengths: np.ndarray
    """[S] int64, tokens per sequence."""
    action_lengths: np.ndarray
    """[S] int64, trained tokens per sequence (≥ 1)."""
    action_positions: np.ndarray
    """[N] int64, position of each trained token within its sequence (≥ 1)."""
    turn: np.ndarray
    """[N] int64, index of the trained token's answer within its sequence."""
    number: np.ndarray
    """[R] int64, number of the row in its data set, from 0."""
    source: np.ndarray
    """[R] int64, index into `sources`."""
    sources: tuple[str, ...]
    """Names of the data sets."""
    per_row: int = 1
    """Sequences of a row: 2 for pairs."""
    margin: np.ndarray | None = None
    """[R] float64, of pairs."""
    desirable: np.ndarray | None = None
    """[R] bool, of judged answers."""
    labels: np.ndarray | None = None
    """[N] float64 in 0 … 1, of steps."""
    ref_logprobs: np.ndarray | None = None
    """[N] float32, under the reference model."""

    @property
    def action_count(self) -> int:
        """N."""
        return len(self.action_positions)

    @property
    def rollout_count(self) -> int:
        """R: what the learner of rollouts calls a rollout is here a row."""
        return len(self.number)

    @property
    def rollout_of(self) -> np.ndarray:
        """[S] int64, the row of each sequence."""
        return np.arange(len(self.lengths)) // self.per_row

    @property
    def together(self) -> np.ndarray | None:
        """[S] int64, the row of each sequence where a row has several."""
        return self.rollout_of if self.per_row > 1 else None

    @property
    def family(self) -> np.ndarray:
        """[S] int64, the row of each sequence: the sides of a pair begin with the same prompt."""
        return self.rollout_of

    @property
    def row_lengths(self) -> np.ndarray:
        """[R] int64, tokens per row."""
        return self.lengths.reshape(-1, self.per_row).sum(1)

    @property
    def digest(self) -> str:
        """SHA-256 of every token, and of which are trained."""
        return _sha256(self.tokens, self.lengths, self.action_lengths, self.action_positions)

    @property
    def digest_with_labels(self) -> str:
        """SHA-256 of all that is trained on, beside what other models say of it."""
        tokens = np.frombuffer(self.digest.encode(), np.uint8)
        return _sha256(tokens, self.margin, self.desirable, self.labels)

    def name(self, row: int) -> str:
        """What messages call a row: `row 12 of pairs`."""
        return f"row {self.number[row]} of {self.sources[self.source[row]]}"

    def action_indices(self, rows: np.ndarray) -> np.ndarray:
        """Where on the axis [N] the trained tokens of some rows lie, in their order."""
        return ragged_indices(self.action_lengths, self._sequences(rows))

    def take(self, rows: np.ndarray) -> RowBatch:
        """The given rows, in the given order."""
        sequences = self._sequences(rows)
        index = {
            **dict.fromkeys(_PER_TOKEN, ragged_indices(self.lengths, sequences)),
            **dict.fromkeys(_PER_SEQUENCE, sequences),
            **dict.fromkeys(_PER_ACTION, ragged_indices(self.action_lengths, sequences)),
            **dict.fromkeys(_PER_ROW, rows),
        }
        chosen = {
            name: values[where]
            for name, where in index.items()
            if (values := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **chosen)

    def _sequences(self, rows: np.ndarray) -> np.ndarray:
        return (rows[:, None] * self.per_row + np.arange(self.per_row)).reshape(-1)


def _sha256(*columns: np.ndarray | None) -> str:
    digest = hashlib.sha256()
    for values in columns:
        digest.update(b"" if values is None else np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def join(parts: Sequence[RowBatch]) -> RowBatch:
    """Several data sets of the same kind as one, the rows of the first one first."""
    first = parts[0]
    if len(parts) == 1:
        return first
    sources = tuple(name for part in parts for name in part.sources)
    offsets = np.cumsum([0, *(len(part.sources) for part in parts)])
    columns: dict[str, np.ndarray] = {}
    for name in (*_PER_TOKEN, *_PER_SEQUENCE, *_PER_ACTION, *_PER_ROW):
        if getattr(first, name) is not None:
            columns[name] = np.concatenate([getattr(part, name) for part in parts])
    columns["source"] = np.concatenate(
        [part.source + offset for part, offset in zip(parts, offsets, strict=False)]
    )
    return dataclasses.replace(first, **columns, sources=sources)  # type: ignore[arg-type]
