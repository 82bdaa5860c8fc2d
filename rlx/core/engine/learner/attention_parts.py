"""One part of a ragged attention: a batch of queries over keys, forward and backward.

On a CPU in float32, and for long parts, PyTorch's flash kernel computes it. In bfloat16 that kernel
is 2 to 5 times slower than matrix products of at most some hundred tokens, which are used there.

Legend as in `ragged_attention`; m queries, n keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LONG = 1024
"""Keys from which on the flash kernel, which passes over blocks above the diagonal, is as fast."""
LOG2_E = math.log2(math.e)
_FLOATS = 2**20
"""Scores of a piece that is worked on at a time on a CPU, which its cache holds."""
_MANY_FLOATS = 2**26


@dataclass(frozen=True, slots=True)
class Part:
    """Queries [b, H, m, D], keys and values [b, K, n, D]; causal parts have m = n."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    causal: bool


def part_forward(part: Part) -> tuple[Tensor, Tensor]:
    """Outputs [b, H, m, D] and log-sums of exponentials [b, H, m] float32."""
    if _by_flash(part):
        output, logsum = _flash()(
            part.q, part.k, part.v, 0.0, part.causal, attn_mask=None, scale=part.scale
        )
        return output, logsum
    q, k, v = _grouped(part.q, part.k), _merged(part.k), _merged(part.v)
    output = torch.empty_like(q)
    logsum = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    length = part.q.shape[2]
    future = torch.full((length, length), -torch.inf, device=q.device).triu_(1)
    for place in _pieces(q, k):
        scores = _scores(part, q[place], k[place])
        if part.causal:
            _by_query(part, scores).add_(future)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        output[place] = torch.bmm(weights.to(q.dtype), v[place]) / total
        logsum[place] = (total.log2_() + top)[..., 0] / LOG2_E
    return output.view(part.q.shape), logsum.view(part.q.shape[:3])


def part_backward(
    part: Part, upstream: Tensor, output: Tensor, logsum: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given those of the joint output.

    Args:
        upstream, output: [b, H, m, D], of all parts together.
        logsum, delta: [b, H, m] float32, likewise; ∂o · o.
    """
    if _by_flash(part):
        found: tuple[Tensor, Tensor, Tensor] = _flash_backward()(
            upstream,
            part.q,
            part.k,
            part.v,
            output,
            logsum.contiguous(),
            0.0,
            part.causal,
            attn_mask=None,
            scale=part.scale,
        )
        return found
    q, k, v = _grouped(part.q, part.k), _merged(part.k), _merged(part.v)
    above = _grouped(upstream, part.k)
    logsum = (logsum * LOG2_E).reshape(q.shape[0], -1, 1)
    delta = delta.reshape(q.shape[0], -1, 1)
    by_q, by_k, by_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for place in _pieces(q, k):
        weights = _scores(part, q[place], k[place]).sub_(logsum[place]).exp2_()
        if part.causal:
            _by_query(part, weights).tril_()
        by_v[place] = torch.bmm(weights.to(v.dtype).transpose(1, 2), above[place])
        slope = torch.bmm(above[place], v[place].transpose(1, 2)).float().sub_(delta[place])
        slope = slope.mul_(weights).mul_(part.scale).to(q.dtype)
        by_q[place] = torch.bmm(slope, k[place])
        by_k[place] = torch.bmm(slope.transpose(1, 2), q[place])
    return by_q.view(part.q.shape), by_k.view(part.k.shape), by_v.view(part.v.shape)


def _by_flash(part: Part) -> bool:
    if part.q.device.type != "cpu":
        return False
    return part.q.dtype == torch.float32 or (part.causal and part.k.shape[2] >= _LONG)


def _flash() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _flash_backward() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _grouped(q: Tensor, k: Tensor) -> Tensor:
    """Queries [b, H, m, D] → [b · K, r · m, D]: those that have their keys in common."""
    return q.reshape(k.shape[0] * k.shape[1], -1, q.shape[-1])


def _merged(k: Tensor) -> Tensor:
    """[b, K, n, D] → [b · K, n, D]."""
    return k.reshape(-1, *k.shape[2:])


def _pieces(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Of the leading axis, so that the scores of a piece stay small."""
    most = _FLOATS if q.device.type == "cpu" else _MANY_FLOATS
    step = max(1, most // max(q.shape[1] * k.shape[1], 1))
    return (slice(start, start + step) for start in range(0, q.shape[0], step))


def _scores(part: Part, q: Tensor, k: Tensor) -> Tensor:
    """Scores [p, r · m, n] float32 in bits: of a base-2 exponential, which is the faster one."""
    return torch.bmm(q, k.transpose(1, 2)).float().mul_(part.scale * LOG2_E)


def _by_query(part: Part, scores: Tensor) -> Tensor:
    """[p, r · m, n] → [p · r, m, n]."""
    return scores.view(-1, part.q.shape[2], part.k.shape[2])
