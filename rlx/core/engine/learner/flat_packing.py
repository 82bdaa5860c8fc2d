"""Flat packing: micro-batches of one row without pads, in which common prefixes stand once.

A tree of the batch becomes a stem (the tokens that its sequences have in common) followed by its
branches (what each has to itself), whose positions go on from the stem. The hidden state at the
stem's last token predicts the first token of every branch. Trees are placed first-fit, largest
first; one that is larger than a micro-batch may be is cut into several with a stem each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlx.core.engine.learner.packing import Layout, MicroBatch, Packable, read_lengths
from rlx.core.engine.learner.prefixes import Tree, find_trees


def make_flat_micro_batches(
    batch: Packable, *, token_budget: int, worth: int | None, whole: bool = False
) -> list[MicroBatch]:
    """Micro-batches of the sequences of `batch` that hold action tokens.

    Args:
        token_budget: most tokens in a micro-batch, unless one sequence has more, or sequences that
            must be together.
        whole: with the tokens that no log-prob depends on, too.
        worth: least saving (≥ 1), in tokens, for which sequences share their prefix; None: never.
    """
    starts = np.cumsum(batch.lengths) - batch.lengths
    used = np.flatnonzero(batch.action_lengths)
    lengths = batch.lengths if whole else read_lengths(batch)

    def tokens(index: int) -> np.ndarray:
        return batch.tokens[starts[index] : starts[index] + lengths[index]]

    units: list[list[Tree]] = []
    for family in _families(batch, used, worth):
        trees = (
            [Tree(sequences=(index,), prefix=0) for index in family]
            if worth is None
            else find_trees(tokens, family, worth=worth)
        )
        if batch.together is None:
            units += [[part] for tree in trees for part in _cut(tree, lengths, token_budget)]
        else:
            units.append(trees)
    sizes = [sum(tree_tokens(tree, lengths) for tree in unit) for unit in units]
    return [
        _lay_out(batch, starts, lengths, [tree for index in block for tree in units[index]])
        for block in first_fit(np.array(sizes, np.int64), token_budget)
    ]


def _families(batch: Packable, used: np.ndarray, worth: int | None) -> Iterator[list[int]]:
    """Sequences that may share or must be together; else each its own."""
    if worth is None and batch.together is None:
        yield from ([int(index)] for index in used)
        return
    family = batch.family[used]
    order = np.argsort(family, kind="stable")
    for part in np.split(used[order], np.flatnonzero(np.diff(family[order])) + 1):
        if len(part):
            yield part.tolist()


def tree_tokens(tree: Tree, lengths: np.ndarray) -> int:
    """Tokens of a tree, its stem once."""
    own = sum(int(lengths[index]) - tree.prefix for index in tree.sequences)
    return tree.prefix + own


def _cut(tree: Tree, lengths: np.ndarray, token_budget: int) -> Iterator[Tree]:
    """Trees within the budget that hold the sequences of `tree`."""
    part: list[int] = []
    size = tree.prefix
    for index in tree.sequences:
        own = int(lengths[index]) - tree.prefix
        if part and size + own > token_budget:
            yield Tree(sequences=tuple(part), prefix=tree.prefix if len(part) > 1 else 0)
            part, size = [], tree.prefix
        part.append(index)
        size += own
    yield Tree(sequences=tuple(part), prefix=tree.prefix if len(part) > 1 else 0)


def first_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Indices of the items of each bin, first-fit decreasing; a larger item has its own bin."""
    space = np.zeros(len(sizes), np.int64)
    bins: list[list[int]] = []
    for index in np.argsort(-sizes, kind="stable"):
        fits = np.flatnonzero(space[: len(bins)] >= sizes[index])
        place = int(fits[0]) if len(fits) else len(bins)
        if place == len(bins):
            bins.append([])
            space[place] = max(capacity, sizes[index])
        bins[place].append(int(index))
        space[place] -= sizes[index]
    return bins


def _lay_out(
    batch: Packable, starts: np.ndarray, lengths: np.ndarray, trees: Sequence[Tree]
) -> MicroBatch:
    action_starts = np.cumsum(batch.action_lengths) - batch.action_lengths
    tokens, positions, spans, stems = [], [], [], []
    sources, targets, actions = [], [], []
    end = 0

    def put(first: int, start: int, stop: int) -> int:
        """Lay tokens `start:stop` of the sequence that begins at `first`; returns where."""
        nonlocal end
        tokens.append(batch.tokens[first + start : first + stop])
        positions.append(np.arange(start, stop))
        spans.append((end, end + stop - start))
        end += stop - start
        return end - (stop - start)

    for tree in trees:
        stem = put(int(starts[tree.sequences[0]]), 0, tree.prefix) if tree.prefix else 0
        branches = end
        for index in tree.sequences:
            branch = put(int(starts[index]), tree.prefix, int(lengths[index]))
            mine = action_starts[index] + np.arange(batch.action_lengths[index])
            at = batch.action_positions[mine]
            sources.append(at - 1 + np.where(at <= tree.prefix, stem, branch - tree.prefix))
            targets.append(batch.tokens[starts[index] + at])
            actions.append(mine)
        if tree.prefix:
            stems.append((stem, branches, end))
    flat = np.concatenate(tokens).astype(np.int64)
    sequences = np.array([index for tree in trees for index in tree.sequences], np.int64)
    return MicroBatch(
        tokens=flat[None],
        positions=np.concatenate(positions)[None],
        source=np.concatenate(sources),
        targets=np.concatenate(targets).astype(np.int64),
        sequences=sequences,
        actions=np.concatenate(actions),
        action_lengths=batch.action_lengths[sequences],
        layout=Layout(
            spans=np.array(spans, np.int64), stems=np.array(stems, np.int64).reshape(-1, 3)
        ),
    )
