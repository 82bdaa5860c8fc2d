"""Common prefixes: which sequences of a batch share the computation of their first tokens.

Sequences of one family (the rollouts of a group, the sides of a pair) mostly start with the same
prompt. A *tree* is some of them with the longest prefix that all have in common, each keeping at
least its last token to itself. Of P common tokens and n sequences, (n − 1) · P are saved.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Sequences with what they have in common at their beginning."""

    sequences: tuple[int, ...]
    """Indices on the batch's axis [S]."""
    prefix: int
    """Tokens in common; 0 where nothing is shared."""


def find_trees(
    tokens: Callable[[int], np.ndarray], sequences: Sequence[int], *, worth: int
) -> list[Tree]:
    """Split the sequences of a family into trees so that the most tokens are saved.

    Sorted by their tokens, sequences with a long common prefix are neighbours, and the prefix of a
    run of them is the shortest one between two neighbours. So the best split is looked for there.

    Args:
        tokens: index of a sequence → its tokens.
        worth: least saving (≥ 1), in tokens, for which sequences become a tree.
    """
    ordered = sorted(sequences, key=lambda index: tokens(index).astype(">i8").tobytes())
    rows = [tokens(index) for index in ordered]
    common = np.array([_common(*pair) for pair in itertools.pairwise(rows)], np.int64)
    lengths = np.array([len(row) for row in rows], np.int64)

    def best(start: int, stop: int) -> tuple[int, list[Tree]]:
        """Saving of `ordered[start:stop]`, and its trees."""
        inner = common[start : stop - 1]
        alone = [Tree(sequences=(index,), prefix=0) for index in ordered[start:stop]]
        if not len(inner):
            return 0, alone
        cut = start + int(inner.argmin())
        prefix = min(int(common[cut]), int(lengths[start:stop].min()) - 1)
        whole = prefix * len(inner)
        parts, split = 0, alone
        if inner.sum() - common[cut] > whole:  # no split saves more than that
            left, right = best(start, cut + 1), best(cut + 1, stop)
            parts, split = left[0] + right[0], left[1] + right[1]
        if whole >= max(parts, worth):
            return whole, [Tree(sequences=tuple(sorted(ordered[start:stop])), prefix=prefix)]
        return parts, split

    return best(0, len(ordered))[1] if ordered else []


def _common(first: np.ndarray, second: np.ndarray) -> int:
    """Length of the longest common prefix."""
    shared = min(len(first), len(second))
    differing = np.flatnonzero(first[:shared] != second[:shared])
    return int(differing[0]) if len(differing) else shared
