"""Where the tokens of a flat row stand in the batches of spans that attention is computed in.

A branch's short stem is laid in front of the branch's own keys, so that all its scores are one
matrix; a long one is a part of its own, whose keys are not copied. Features are gathered head by
head into the order in which they are multiplied, and put back in the same way, in one pass each.

Legend: T tokens, H query heads, K key heads (H = K · r), D features of a head; b spans of at most
L tokens in a bucket, behind S tokens of their stem.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlx.core.engine.learner.packing import Layout

_SLACK = 0.8
"""Shortest span in a bucket, relative to the longest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Spans of like length, padded to one, behind stems of the same length."""

    queries: Tensor
    """[b, L] int64, the token in each place; pads point to some token."""
    keys: Tensor
    """[b, S + L] int64."""
    pads: Tensor | None
    """[b, L] bool."""
    stems: Tensor
    """[t, S] int64, tokens of the stems; S may be 0."""
    stem_of: Tensor
    """[b] int64, the stem of each span."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stems:
    """Parts of their own: stems of one length with as many tokens on the branches of each."""

    keys: Tensor
    """[t, S] int64, the stems' tokens."""
    queries: Tensor
    """[t, m] int64, the tokens of all branches of each."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Where the rows [D] of each head's features are, for one number of heads."""

    gather: tuple[Tensor, ...]
    """Of each bucket: row of [T · heads] in each place of [b, K, heads / K, L]."""
    slot: Tensor
    """[T · heads], place of each row in all buckets, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedLayout:
    """A `Layout` on its device, as the attention of every layer needs it."""

    buckets: tuple[Bucket, ...]
    stems: tuple[Stems, ...]
    tokens: int
    _rows: dict[tuple[str, int, int], Rows] = dataclasses.field(default_factory=dict)

    @staticmethod
    def of(
        layout: Layout, device: torch.device, *, joined: int = 0, shorter: int | None = None
    ) -> RaggedLayout:
        """
        Args:
            joined: most tokens of a stem that is laid in front of its branches.
            shorter: where given, only in front of branches that all have fewer tokens.
        """
        stem_of = _stem_of(layout)
        lengths = layout.spans[:, 1] - layout.spans[:, 0]
        in_front = layout.stems[:, 1] - layout.stems[:, 0]
        apart = in_front > joined
        if shorter is not None:
            apart[np.setdiff1d(stem_of[lengths >= shorter], [-1])] = True
        sizes = np.append(np.where(apart, 0, in_front), 0)[stem_of]
        return RaggedLayout(
            buckets=tuple(
                _bucket(layout, chosen, stem_of[chosen], int(sizes[chosen[0]]), device)
                for chosen in _alike(lengths, sizes)
            ),
            stems=tuple(_stems(layout.stems[apart], device)),
            tokens=int(layout.spans[:, 1].max()),
        )

    def query_rows(self, heads: int, groups: int) -> Rows:
        """Of `heads` query heads, those with the same of `groups` key heads side by side."""
        return self._known("queries", heads, groups)

    def key_rows(self, heads: int) -> Rows:
        return self._known("keys", heads, heads)

    def _known(self, name: str, heads: int, groups: int) -> Rows:
        key = (name, heads, groups)
        if key not in self._rows:
            self._rows[key] = self._find(name, heads, groups)
        return self._rows[key]

    def _find(self, name: str, heads: int, groups: int) -> Rows:
        gather, offset = [], 0
        slot = self.buckets[0].queries.new_empty(self.tokens * heads)
        for bucket in self.buckets:
            index = getattr(bucket, name)
            head = torch.arange(heads, device=index.device).view(1, groups, -1, 1)
            rows = index[:, None, None] * heads + head
            gather.append(rows.flatten())
            places = torch.arange(rows.numel(), device=index.device).view(rows.shape) + offset
            own = bucket.queries.shape[1]
            rows, places = rows[..., -own:], places[..., -own:]
            if bucket.pads is not None:
                real = ~bucket.pads[:, None, None].expand(rows.shape)
                rows, places = rows[real], places[real]
            slot[rows.flatten()] = places.flatten()
            offset += gather[-1].numel()
        return Rows(gather=tuple(gather), slot=slot)


def _stem_of(layout: Layout) -> np.ndarray:
    """[k] int64: the stem that each span reads, or -1."""
    found = np.full(len(layout.spans), -1)
    for index, (_, stop, end) in enumerate(layout.stems):
        found[(layout.spans[:, 0] >= stop) & (layout.spans[:, 0] < end)] = index
    return found


def _stems(apart: np.ndarray, device: torch.device) -> Iterator[Stems]:
    """Those of the same shape together.

    Args:
        apart: [s, 3], start, stop and branches' stop of each.
    """
    shapes = np.diff(apart)
    for size, own in np.unique(shapes, axis=0):
        starts = apart[(shapes == (size, own)).all(1), :1]
        keys, queries = starts + np.arange(size), starts + size + np.arange(own)
        yield Stems(
            keys=torch.from_numpy(keys).to(device), queries=torch.from_numpy(queries).to(device)
        )


def _alike(lengths: np.ndarray, sizes: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of spans of like length, longest first, with stems of the same size."""
    for size in np.unique(sizes):
        order = np.flatnonzero(sizes == size)
        order = order[np.argsort(-lengths[order], kind="stable")]
        while len(order):
            few = lengths[order] < _SLACK * lengths[order[0]]
            stop = int(few.argmax()) if few.any() else len(order)
            yield order[:stop]
            order = order[stop:]


def _bucket(
    layout: Layout, chosen: np.ndarray, stem_of: np.ndarray, size: int, device: torch.device
) -> Bucket:
    """The spans `chosen`, whose stems `stem_of` of `size` tokens lie in front of them."""
    starts, stops = layout.spans[chosen].T
    index = starts[:, None] + np.arange(int((stops - starts).max()))
    real = index < stops[:, None]
    index = np.where(real, index, 0)
    own, of = np.unique(stem_of, return_inverse=True)
    first = layout.stems[own, 0] if size else np.zeros(len(own), np.int64)
    stems = first[:, None] + np.arange(size)
    arrays = (index, np.concatenate([stems[of], index], 1), stems, of)
    queries, keys, stem_tokens, stem_index = (torch.from_numpy(one).to(device) for one in arrays)
    return Bucket(
        queries=queries,
        keys=keys,
        pads=None if real.all() else torch.from_numpy(~real).to(device),
        stems=stem_tokens,
        stem_of=stem_index,
    )
