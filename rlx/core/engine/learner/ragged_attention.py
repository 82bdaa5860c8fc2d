"""Exact attention in flat rows of sequences that have stems in common, without foreign scores.

The scores of a token are those of its own span and, on a branch, those of its stem. Each part is
computed by itself, spans of like length as one batch, the branches of a stem as one block:

    o_part = softmax(s_part) · v_part,   l_part = logsumexp(s_part),   s = q · k · scale

and the parts are joined by l = log Σ exp(l_part), o = Σ exp(l_part − l) · o_part. Backward each
part has p = exp(s − l) with the joint l, and with δ = ∂o · o

    ∂v = pᵀ ∂o,   ∂s = p · (∂o · vᵀ − δ),   ∂q = ∂s · k · scale,   ∂k = ∂sᵀ · q · scale,

so that a stem's keys collect the gradients of all branches, and nothing of a row's length squared
is ever stored (as in FlashAttention, Dao 2023, https://arxiv.org/abs/2307.08691).

Legend: T tokens, H query heads, K key heads (H = K · r), D features of a head; b spans of at most
L tokens in a batch of spans.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlx.core.engine.learner.attention_parts import Part, part_backward, part_forward
from rlx.core.engine.learner.packing import Layout

NAME = "rlx_ragged"
"""Of this attention in transformers' registry."""
_SLACK = 0.8
"""Shortest span in a batch of spans, relative to the longest."""


class UnsupportedAttentionError(Exception):
    """The model's attention does what this one doesn't: windows, sinks, soft-capping, dropout."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedLayout:
    """A `Layout` on its device, as the attention of every layer needs it."""

    buckets: tuple[Bucket, ...]
    slot: Tensor
    """[T] int64, where each token is in the buckets laid one after the other."""
    stems: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(layout: Layout, device: torch.device) -> RaggedLayout:
        buckets, slots, offset = [], np.empty(int(layout.spans[:, 1].max()), np.int64), 0
        for chosen in _like_lengths(layout.spans[:, 1] - layout.spans[:, 0]):
            starts, stops = layout.spans[chosen].T
            width = int((stops - starts).max())
            index = starts[:, None] + np.arange(width)
            real = index < stops[:, None]
            slots[index[real]] = offset + np.flatnonzero(real)
            offset += index.size
            index = np.where(real, index, 0)
            pads = None if real.all() else torch.from_numpy(~real).to(device)
            buckets.append(Bucket(index=torch.from_numpy(index).to(device), pads=pads))
        return RaggedLayout(
            buckets=tuple(buckets),
            slot=torch.from_numpy(slots).to(device),
            stems=tuple((int(a), int(b), int(c)) for a, b, c in layout.stems),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Spans of like length, padded to one."""

    index: Tensor
    """[b, L] int64, the token in each place; pads point to some token."""
    pads: Tensor | None
    """[b, L] bool."""

    def gather(self, flat: Tensor) -> Tensor:
        """[T, h, D] → [b, h, L, D]."""
        b, width = self.index.shape
        return (
            flat.index_select(0, self.index.view(-1))
            .view(b, width, *flat.shape[1:])
            .transpose(1, 2)
        )

    def gather_rows(self, flat: Tensor, pad: float) -> Tensor:
        """[T, H] → [b, H, L], with `pad` in the pads."""
        b, width = self.index.shape
        rows = flat.index_select(0, self.index.view(-1)).view(b, width, -1)
        if self.pads is not None:
            rows.masked_fill_(self.pads[:, :, None], pad)
        return rows.transpose(1, 2)


def _like_lengths(lengths: np.ndarray) -> Iterator[np.ndarray]:
    """Indices of spans of like length, longest first."""
    order = np.argsort(-lengths, kind="stable")
    while len(order):
        few = lengths[order] < _SLACK * lengths[order[0]]
        stop = int(few.argmax()) if few.any() else len(order)
        yield order[:stop]
        order = order[stop:]


class _RaggedAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, K, D] → [T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: RaggedLayout, scale: float
    ) -> Tensor:
        outputs, logsums = [], []
        for bucket in layout.buckets:
            part = Part(bucket.gather(q), bucket.gather(k), bucket.gather(v), scale, causal=True)
            output, logsum = part_forward(part)
            outputs.append(output.transpose(1, 2).reshape(-1, *q.shape[1:]))
            logsums.append(logsum.transpose(1, 2).reshape(-1, q.shape[1]))
        output, logsum = _in_order(outputs, layout.slot), _in_order(logsums, layout.slot)
        for start, stop, end in layout.stems:
            part = _stem_part(q, k, v, start, stop, end, scale)
            theirs, their_logsum = part_forward(part)
            _join(output[stop:end], logsum[stop:end], theirs[0].transpose(0, 1), their_logsum[0].T)
        ctx.save_for_backward(q, k, v, output, logsum)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsum = ctx.saved_tensors
        layout: RaggedLayout = ctx.layout
        delta = torch.linalg.vecdot(upstream.float(), output.float())
        parts: list[tuple[Tensor, ...]] = []
        for bucket in layout.buckets:
            part = Part(
                bucket.gather(q), bucket.gather(k), bucket.gather(v), ctx.scale, causal=True
            )
            found = part_backward(
                part,
                bucket.gather(upstream),
                bucket.gather(output),
                # Of a pad every probability is 0.
                bucket.gather_rows(logsum, torch.inf),
                bucket.gather_rows(delta, 0.0),
            )
            parts.append(tuple(one.transpose(1, 2).reshape(-1, *one.shape[1::2]) for one in found))
        by_q, by_k, by_v = (
            _in_order(list(pieces), layout.slot) for pieces in zip(*parts, strict=True)
        )
        for start, stop, end in layout.stems:
            own = slice(stop, end)
            found = part_backward(
                _stem_part(q, k, v, start, stop, end, ctx.scale),
                _heads(upstream[own]),
                _heads(output[own]),
                logsum[own].T[None],
                delta[own].T[None],
            )
            for total, one, place in zip(
                (by_q, by_k, by_v),
                found,
                (own, slice(start, stop), slice(start, stop)),
                strict=True,
            ):
                total[place] += one[0].transpose(0, 1)
        return by_q, by_k, by_v, None, None


def _in_order(pieces: list[Tensor], slot: Tensor) -> Tensor:
    """Tokens [T, …] from the buckets' places."""
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).index_select(0, slot)


def _heads(flat: Tensor) -> Tensor:
    """[n, h, D] → [1, h, n, D]."""
    return flat.transpose(0, 1)[None]


def _stem_part(
    q: Tensor, k: Tensor, v: Tensor, start: int, stop: int, end: int, scale: float
) -> Part:
    """All branches' queries over their stem."""
    return Part(
        _heads(q[stop:end]), _heads(k[start:stop]), _heads(v[start:stop]), scale, causal=False
    )


def _join(output: Tensor, logsum: Tensor, theirs: Tensor, their_logsum: Tensor) -> None:
    """Join another part [n, H, D] and its log-sums [n, H] into `output` and `logsum`."""
    joint = torch.logaddexp(logsum, their_logsum)
    ours = output.float().mul_((logsum - joint).exp_()[..., None])
    ours.addcmul_(theirs.float(), (their_logsum - joint).exp_()[..., None])
    output.copy_(ours)
    logsum.copy_(joint)


def ragged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    rlx_layout: RaggedLayout | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: `query` [1, H, T, D] → [1, T, H, D].

    Without a layout the row is one sequence.

    Raises:
        UnsupportedAttentionError: it is asked for something that this function does not compute.
    """
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "cache"):
        if options.get(name) is not None:
            raise UnsupportedAttentionError(name)
    if dropout or attention_mask is not None or not getattr(module, "is_causal", True):
        raise UnsupportedAttentionError("a mask or dropout")
    if query.shape[0] != 1 or key.shape[2] != query.shape[2] or value.shape[-1] != query.shape[-1]:
        raise UnsupportedAttentionError("several rows, a cache, or values of another width")
    if rlx_layout is None:
        whole = Layout(spans=np.array([[0, query.shape[2]]]), stems=np.zeros((0, 3), np.int64))
        rlx_layout = RaggedLayout.of(whole, query.device)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    flat = (one[0].transpose(0, 1).contiguous() for one in (query, key, value))
    return _RaggedAttention.apply(*flat, rlx_layout, scale)[None], None


@functools.cache
def register() -> str:
    """Make it known to transformers; returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, ragged_attention)
    return NAME
