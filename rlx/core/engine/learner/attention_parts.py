"""One part of a ragged attention: a batch of queries over keys, forward and backward.

On a CPU in float32, and for long parts, PyTorch's flash kernel computes it. In bfloat16 that kernel
is 2 to 5 times slower than matrix products of at most some hundred tokens, which are used there.

Heads with the same keys are computed together: g = b · K groups of r · m rows of queries.

Legend as in `ragged_layout`; m queries of a span, n keys.
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
    """Queries [g, r · m, D], keys and values [g, n, D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    length: int
    """m."""
    scale: float
    causal: bool
    """Whether query i reads the first n − m + i + 1 keys, and not all of them."""

    @property
    def by_flash(self) -> bool:
        """Whether PyTorch's flash kernel computes it."""
        if self.q.device.type != "cpu" or (self.causal and self.k.shape[1] != self.length):
            return False
        return self.q.dtype == torch.float32 or (self.causal and self.length >= _LONG)


def part_forward(part: Part) -> tuple[Tensor, Tensor]:
    """Outputs [g, r · m, D] and log-sums of exponentials [g, r · m] float32."""
    q, k, v = part.q, part.k, part.v
    if part.by_flash:
        output, logsum = _flash()(
            *_by_head(part), 0.0, part.causal, attn_mask=None, scale=part.scale
        )
        return output.reshape(q.shape), logsum.reshape(q.shape[:2])
    output = torch.empty_like(q)
    logsum = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    future = torch.full((part.length, k.shape[1]), -torch.inf, device=q.device)
    future.triu_(k.shape[1] - part.length + 1)
    for place in _pieces(q, k):
        scores = _scores(part, q[place], k[place])
        if part.causal:
            _by_query(part, scores).add_(future)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        torch.bmm(weights.div_(total).to(q.dtype), v[place], out=output[place])
        logsum[place] = (total.log2_() + top)[..., 0] / LOG2_E
    return output, logsum


def part_backward(
    part: Part,
    upstream: Tensor,
    logsum: Tensor,
    *,
    delta: Tensor | None = None,
    output: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values, given those of the joint output.

    Args:
        upstream: [g, r · m, D], of all parts together.
        logsum: [g, r · m] float32, likewise.
        delta: [g, r · m] float32, likewise, ∂o · o; None: there is no other part.
        output: [g, r · m, D], likewise, for the flash kernel.
    """
    q, k, v = part.q, part.k, part.v
    if part.by_flash:
        assert output is not None
        heads = _by_head(part)
        shape = heads[0].shape
        found = _flash_backward()(
            upstream.view(shape),
            *heads,
            output.view(shape),
            logsum.view(shape[:3]),
            0.0,
            part.causal,
            attn_mask=None,
            scale=part.scale,
        )
        by_q, by_k, by_v = (
            one.reshape(like.shape) for one, like in zip(found, (q, k, v), strict=True)
        )
        return by_q, by_k, by_v
    logsum = (logsum * LOG2_E)[..., None]
    by_q, by_k, by_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for place in _pieces(q, k):
        above = upstream[place]
        weights = _scores(part, q[place], k[place]).sub_(logsum[place]).exp2_()
        if part.causal:
            _by_query(part, weights).tril_(k.shape[1] - part.length)
        torch.bmm(weights.to(v.dtype).transpose(1, 2), above, out=by_v[place])
        slope = torch.bmm(above, v[place].transpose(1, 2)).float()
        own = torch.linalg.vecdot(weights, slope) if delta is None else delta[place]
        slope = slope.sub_(own[..., None]).mul_(weights).mul_(part.scale).to(q.dtype)
        torch.bmm(slope, k[place], out=by_q[place])
        torch.bmm(slope.transpose(1, 2), q[place], out=by_k[place])
    return by_q, by_k, by_v


def _by_head(part: Part) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [g, r, m, D], keys and values [g, 1, n, D]."""
    q = part.q.view(part.q.shape[0], -1, part.length, part.q.shape[-1])
    return q, part.k[:, None], part.v[:, None]


def _flash() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _flash_backward() -> Any:
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    return scores.view(-1, part.length, part.k.shape[1])
