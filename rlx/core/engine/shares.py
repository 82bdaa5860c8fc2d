"""Shares of a batch for the ranks of a learner, so that no rank waits long for another.

Two ways of splitting numbers into parts of near-equal sums, compared by `benchmarks/packing.py`:

- longest processing time first: each number, largest first, to the part with the least so far;
- largest differencing (Karmarkar and Karp 1982, "The differencing method of set partitioning"):
  of all partial splits, the two with the widest gap between their parts are joined, the heaviest
  part of one with the lightest of the other, until one split is left.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from rlx.core.rollouts import TrainBatch


def balanced_shares(lengths: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Split rollouts over ranks with near-equal token counts.

    Each share keeps the batch's order, so that one rank sees the batch unchanged.
    """
    return [np.array(sorted(share), np.int64) for share in largest_differencing(lengths, ranks)]


def batch_shares(batch: TrainBatch, ranks: int, *, shared_prefix: bool) -> list[np.ndarray]:
    """Rollouts of each rank; whole groups where that leaves less to the busiest rank.

    Args:
        shared_prefix: whether the rollouts of a group on one rank share their prompt.
    """
    lengths = batch.rollout_lengths
    apart = balanced_shares(lengths, ranks)
    if not shared_prefix or ranks == 1:
        return apart
    prompts = _prompt_lengths(batch)
    groups = [np.flatnonzero(batch.group == group) for group in np.unique(batch.group)]
    sizes = np.array([_shared_tokens(lengths, prompts, batch.group, group) for group in groups])
    whole = [
        np.sort(np.concatenate([groups[index] for index in share] or [np.zeros(0, np.int64)]))
        for share in balanced_shares(sizes, ranks)
    ]

    def busiest(shares: Sequence[np.ndarray]) -> int:
        return max(_shared_tokens(lengths, prompts, batch.group, share) for share in shares)

    return whole if busiest(whole) < busiest(apart) else apart


def _prompt_lengths(batch: TrainBatch) -> np.ndarray:
    """[B] int64, tokens before each rollout's first action token; 0 with segments or without."""
    prompts = np.zeros(batch.rollout_count, np.int64)
    if batch.segments is None:
        acting = np.flatnonzero(batch.action_lengths)
        firsts = (np.cumsum(batch.action_lengths) - batch.action_lengths)[acting]
        prompts[acting] = batch.action_positions[firsts]
    return prompts


def _shared_tokens(
    lengths: np.ndarray, prompts: np.ndarray, group: np.ndarray, share: np.ndarray
) -> int:
    """Tokens of the rollouts `share`, each group's prompt once."""
    if not len(share):
        return 0
    _, first = np.unique(group[share], return_index=True)
    return int((lengths[share] - prompts[share]).sum() + prompts[share][first].sum())


def longest_first(lengths: np.ndarray, parts: int) -> list[list[int]]:
    """Indices of each part: longest processing time first."""
    loads = np.zeros(parts, np.int64)
    shares: list[list[int]] = [[] for _ in range(parts)]
    for index in np.argsort(-lengths, kind="stable"):
        part = int(loads.argmin())
        shares[part].append(int(index))
        loads[part] += lengths[index]
    return shares


def largest_differencing(lengths: np.ndarray, parts: int) -> list[list[int]]:
    """Indices of each part, the heaviest first: Karmarkar and Karp's method."""
    splits = [
        (-int(length), number, [(int(length), [number])] + [(0, []) for _ in range(parts - 1)])
        for number, length in enumerate(lengths)
    ]
    if not splits:
        return [[] for _ in range(parts)]
    heapq.heapify(splits)
    while len(splits) > 1:
        _, number, first = heapq.heappop(splits)
        _, _, second = heapq.heappop(splits)
        joined = [
            (load + other, mine + theirs)
            for (load, mine), (other, theirs) in zip(first, reversed(second), strict=True)
        ]
        joined.sort(key=lambda part: -part[0])
        # The number, which no other split has, keeps lists from being compared.
        heapq.heappush(splits, (joined[-1][0] - joined[0][0], number, joined))
    return [indices for _, indices in splits[0][2]]
