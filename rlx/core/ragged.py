"""Maths on ragged batches: sums over sequences and groups, reverse scans, whitening.

Legend: B rollouts, N action tokens, P groups. Sequences lie one after the other on the axis [N];
`lengths [B]` says how many action tokens each has, zero included. Nothing here pads or masks.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor as _TorchTensor

Tensor: TypeAlias = _TorchTensor

WHITEN_MIN_VARIANCE = 1e-8


def at_least_float32(values: Tensor) -> Tensor:
    """Cast half-precision (and integer) tensors to float32; float32 and float64 stay."""
    if values.dtype in (torch.float32, torch.float64):
        return values
    return values.to(torch.float32)


def sequence_index(lengths: Tensor, count: int) -> Tensor:
    """Rollout of each action token: lengths [B] -> [N] int64; `count` is N."""
    rollouts = torch.arange(lengths.shape[0], device=lengths.device)
    return torch.repeat_interleave(rollouts, lengths, output_size=count)


def sequence_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each rollout's action tokens: [N] -> [B]; 0 for a rollout without any."""
    return segment_sum(values, sequence_index(lengths, values.shape[0]), lengths.shape[0])


def sequence_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each rollout's action tokens: [N] -> [B]; 0 for a rollout without any."""
    return sequence_sum(values, lengths) / lengths.clamp(min=1)


def to_tokens(values: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Repeat each rollout's value on all of its action tokens: [B] -> [N]; `count` is N."""
    return values.index_select(0, sequence_index(lengths, count))


def next_token(values: Tensor, lengths: Tensor, fill: float = 0.0) -> Tensor:
    """Value of the next action token of the same rollout, `fill` on the last: [N] -> [N]."""
    return _shifted(values, _tokens_left(lengths, values.shape[0]), 1, fill)


def discounted_sum(values: Tensor, lengths: Tensor, gamma: float) -> Tensor:
    """Reverse discounted sum within each rollout: out_t = v_t + γ·out_{t+1}, [N] -> [N].

    Doubles the window from pass to pass, S_{2k}(t) = S_k(t) + γ^k·S_k(t + k), so that a rollout of
    T tokens takes log2(T) vector operations and rounds like a pairwise sum.
    """
    left = _tokens_left(lengths, values.shape[0])
    longest = int(lengths.max()) if lengths.numel() else 0
    window = 1
    while window < longest:
        values = values + gamma**window * _shifted(values, left, window, 0.0)
        window *= 2
    return values


def _tokens_left(lengths: Tensor, count: int) -> Tensor:
    """How many action tokens of the same rollout follow each: [N] int64."""
    ends = to_tokens(lengths.cumsum(0), lengths, count)
    return ends - 1 - torch.arange(count, device=lengths.device)


def _shifted(values: Tensor, left: Tensor, by: int, fill: float) -> Tensor:
    ahead = torch.cat([values[by:], values.new_zeros(min(by, values.shape[0]))])
    return torch.where(left >= by, ahead, torch.full_like(values, fill))


def segment_sum(values: Tensor, index: Tensor, count: int) -> Tensor:
    """Sum of the values that share an index: [B] (or [N]) -> [count]."""
    return values.new_zeros(count).index_add(0, index, values)


def group_size(index: Tensor) -> Tensor:
    """Rollouts in each rollout's group: group index [B] -> [B] int64."""
    return _sum_back(torch.ones_like(index), index)


def group_sum(values: Tensor, index: Tensor) -> Tensor:
    """Sum over each rollout's group: [B] -> [B]."""
    return _sum_back(values, index)


def group_min(values: Tensor, index: Tensor) -> Tensor:
    """Smallest value of each rollout's group: [B] -> [B]."""
    out = values.new_zeros(_count(index)).scatter_reduce(
        0, index, values, "amin", include_self=False
    )
    return out.index_select(0, index)


def group_max(values: Tensor, index: Tensor) -> Tensor:
    """Largest value of each rollout's group: [B] -> [B]."""
    return -group_min(-values, index)


def group_mean(values: Tensor, index: Tensor) -> Tensor:
    """Mean over each rollout's group: [B] -> [B]; exactly the value of a constant group."""
    # Distances from the minimum keep constants exact; in floating point, 3·0.1/3 is not 0.1.
    low = group_min(values, index)
    return low + _sum_back(values - low, index) / group_size(index)


def group_std(values: Tensor, index: Tensor) -> Tensor:
    """Unbiased standard deviation of each rollout's group: [B] -> [B]; 0 for one rollout."""
    squares = _sum_back((values - group_mean(values, index)) ** 2, index)
    return (squares / (group_size(index) - 1).clamp(min=1)).sqrt()


def leave_one_out_mean(values: Tensor, index: Tensor) -> Tensor:
    """Mean of the group's *other* rollouts: [B] -> [B]; a rollout alone gets its own value."""
    low = group_min(values, index)
    above = values - low
    size = group_size(index)
    others = low + (_sum_back(above, index) - above) / (size - 1).clamp(min=1)
    return torch.where(size > 1, others, values)


def mean(values: Tensor) -> Tensor:
    """Mean of all values as a scalar; 0 of none."""
    return values.mean() if values.numel() else values.new_zeros(())


def std(values: Tensor) -> Tensor:
    """Unbiased standard deviation of all values as a scalar; 0 of fewer than two."""
    return values.std() if values.numel() > 1 else values.new_zeros(())


def whiten(values: Tensor, *, scale: bool = True) -> Tensor:
    """Subtract the mean and, with `scale`, divide by sqrt(max(biased variance, 1e-8))."""
    centred = values - mean(values)
    if not scale:
        return centred
    return centred / mean(centred**2).clamp(min=WHITEN_MIN_VARIANCE).sqrt()


def _count(index: Tensor) -> int:
    return int(index.max()) + 1 if index.numel() else 0


def _sum_back(values: Tensor, index: Tensor) -> Tensor:
    return segment_sum(values, index, _count(index)).index_select(0, index)
