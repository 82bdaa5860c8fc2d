"""Exact attention in flat rows of sequences that have stems in common, without foreign scores.

The scores of a token are those of its own span and, on a branch, those of its stem. Each part is
computed by itself, spans of like length as one batch, the branches of a stem as one block:

    o_part = softmax(s_part) · v_part,   l_part = logsumexp(s_part),   s = q · k · scale

and the parts are joined by l = log Σ exp(l_part), o = Σ exp(l_part − l) · o_part. Backward each
part has p = exp(s − l) with the joint l, and with δ = ∂o · o

    ∂v = pᵀ ∂o,   ∂s = p · (∂o · vᵀ − δ),   ∂q = ∂s · k · scale,   ∂k = ∂sᵀ · q · scale,

so that a stem's keys collect the gradients of all branches, and nothing of a row's length squared
is ever stored (as in FlashAttention, Dao 2023, https://arxiv.org/abs/2307.08691).

What is its part and what lies in front of a span says `ragged_layout`, the legend too.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlx.core.engine.learner.attention_parts import Part, part_backward, part_forward
from rlx.core.engine.learner.packing import Layout
from rlx.core.engine.learner.ragged_layout import Bucket, RaggedLayout, Rows, Stems

NAME = "rlx_ragged"
"""Of this attention in transformers' registry."""
_JOINED = 64
"""Most tokens of a stem that is laid in front of each of its branches."""
_FLASH = 512
"""Tokens of a branch from which on the flash kernel beside a stem of its own is as fast."""


class UnsupportedAttentionError(Exception):
    """The model's attention does what this one doesn't: windows, sinks, soft-capping, dropout."""


class _RaggedAttention(torch.autograd.Function):
    """q [T, H, D], k and v [T, K, D] → [T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: RaggedLayout, scale: float
    ) -> Tensor:
        rows = layout.query_rows(q.shape[1], k.shape[1])
        found = [
            part_forward(_bucket_part(q, k, v, layout, number, scale))
            for number in range(len(layout.buckets))
        ]
        output = _put_back([one.flatten(0, 1) for one, _ in found], rows).view(q.shape)
        logsum = _put_back([one.flatten() for _, one in found], rows).view(q.shape[:2])
        for stems in layout.stems:
            theirs, their_logsum = part_forward(_stem_part(q, k, v, stems, scale))
            _join(
                output,
                logsum,
                stems.queries.flatten(),
                _by_token(theirs, stems),
                _by_token(their_logsum[..., None], stems)[..., 0],
            )
        ctx.save_for_backward(q, k, v, output, logsum)
        ctx.layout, ctx.scale = layout, scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, output, logsum = ctx.saved_tensors
        layout: RaggedLayout = ctx.layout
        query_rows = layout.query_rows(q.shape[1], k.shape[1])
        # Of spans alone it comes out of their own scores.
        delta = torch.linalg.vecdot(upstream.float(), output.float()) if layout.stems else None
        found = []
        for number, bucket in enumerate(layout.buckets):
            part = _bucket_part(q, k, v, layout, number, ctx.scale)
            index = query_rows.gather[number]
            found.append(
                part_backward(
                    part,
                    _gathered(upstream, index).view(part.q.shape),
                    # Of a pad every probability is 0.
                    _gathered_numbers(logsum, index, bucket, torch.inf).view(part.q.shape[:2]),
                    delta=None
                    if delta is None
                    else _gathered_numbers(delta, index, bucket, 0.0).view(part.q.shape[:2]),
                    output=_gathered(output, index).view(part.q.shape) if part.by_flash else None,
                )
            )
        by_q = _put_back([one.flatten(0, 1) for one, _, _ in found], query_rows).view(q.shape)
        by_k = _collected(layout, [one for _, one, _ in found], k.shape)
        by_v = _collected(layout, [one for _, _, one in found], v.shape)
        for stems in layout.stems:
            assert delta is not None
            groups, stem, own = k.shape[1], stems.keys.flatten(), stems.queries.flatten()
            part = _stem_part(q, k, v, stems, ctx.scale)
            by_queries, by_keys, by_values = part_backward(
                part,
                _grouped(upstream, stems.queries, groups),
                _grouped(logsum[..., None], stems.queries, groups)[..., 0],
                delta=_grouped(delta[..., None], stems.queries, groups)[..., 0],
                output=_grouped(output, stems.queries, groups) if part.by_flash else None,
            )
            by_q.index_add_(0, own, _by_token(by_queries, stems))
            for total, one in ((by_k, by_keys), (by_v, by_values)):
                shape = (len(stems.keys), groups, -1, one.shape[-1])
                total.index_add_(0, stem, one.view(shape).transpose(1, 2).flatten(0, 1))
        return by_q, by_k, by_v, None, None


def _bucket_part(
    q: Tensor, k: Tensor, v: Tensor, layout: RaggedLayout, number: int, scale: float
) -> Part:
    """The spans of a bucket over what lies in front of them and over themselves."""
    bucket, groups, width = layout.buckets[number], k.shape[1], q.shape[-1]
    queries = layout.query_rows(q.shape[1], groups).gather[number]
    keys = layout.key_rows(groups).gather[number]
    count = len(bucket.queries) * groups
    return Part(
        _gathered(q, queries).view(count, -1, width),
        _gathered(k, keys).view(count, -1, width),
        _gathered(v, keys).view(count, -1, width),
        bucket.queries.shape[1],
        scale,
        causal=True,
    )


def _gathered(flat: Tensor, index: Tensor) -> Tensor:
    """[T, h, D] → [places, D]."""
    return flat.view(-1, flat.shape[-1]).index_select(0, index)


def _gathered_numbers(flat: Tensor, index: Tensor, bucket: Bucket, pad: float) -> Tensor:
    """[T, h] → [places], with `pad` in the pads."""
    found = flat.view(-1).index_select(0, index)
    if bucket.pads is not None:
        b, width = bucket.pads.shape
        found.view(b, -1, width).masked_fill_(bucket.pads[:, None], pad)
    return found


def _put_back(pieces: list[Tensor], rows: Rows) -> Tensor:
    """[T · h, …] from the places in all buckets."""
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces)).index_select(0, rows.slot)


def _collected(layout: RaggedLayout, pieces: list[Tensor], shape: torch.Size) -> Tensor:
    """Gradient [T, K, D] of keys (or values) from those of the buckets [b · K, S + L, D]: a stem's
    are the sum over the spans that it lies in front of."""
    rows = layout.key_rows(shape[1])
    total = _put_back([piece.flatten(0, 1) for piece in pieces], rows).view(shape)
    for bucket, piece in zip(layout.buckets, pieces, strict=True):
        count, size = bucket.stems.shape
        if not size:
            continue
        copies = piece.view(len(bucket.queries), shape[1], -1, shape[2])[:, :, :size].float()
        sums = copies.new_zeros(count, *copies.shape[1:]).index_add_(0, bucket.stem_of, copies)
        stems = bucket.stems.flatten()
        sums = sums.transpose(1, 2).flatten(0, 1)
        total[stems] = (total[stems] + sums).to(total.dtype)
    return total


def _grouped(flat: Tensor, tokens: Tensor, groups: int) -> Tensor:
    """[T, h, D] at `tokens` [t, m] → [t · K, h / K · m, D]: heads with the same keys one after the
    other."""
    count, length = tokens.shape
    found = flat.index_select(0, tokens.flatten()).view(count, length, groups, -1, flat.shape[-1])
    return found.permute(0, 2, 3, 1, 4).reshape(count * groups, -1, flat.shape[-1])


def _by_token(grouped: Tensor, stems: Stems) -> Tensor:
    """[t · K, r · m, D] → [t · m, H, D]."""
    count, length = stems.queries.shape
    return grouped.reshape(count, -1, length, grouped.shape[-1]).transpose(1, 2).flatten(0, 1)


def _stem_part(q: Tensor, k: Tensor, v: Tensor, stems: Stems, scale: float) -> Part:
    """All branches' queries over their stems."""
    groups = k.shape[1]
    return Part(
        _grouped(q, stems.queries, groups),
        _grouped(k, stems.keys, groups),
        _grouped(v, stems.keys, groups),
        stems.queries.shape[1],
        scale,
        causal=False,
    )


def _join(
    output: Tensor, logsum: Tensor, tokens: Tensor, theirs: Tensor, their_logsum: Tensor
) -> None:
    """Join another part [n, H, D] and its log-sums [n, H] in, at `tokens`."""
    ours = logsum[tokens]
    joint = torch.logaddexp(ours, their_logsum)
    joined = output[tokens].float().mul_((ours - joint).exp_()[..., None])
    joined.addcmul_(theirs.float(), (their_logsum - joint).exp_()[..., None])
    output.index_copy_(0, tokens, joined.to(output.dtype))
    logsum.index_copy_(0, tokens, joint)


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


def laid_out(layout: Layout, device: torch.device, dtype: torch.dtype) -> RaggedLayout:
    """The layout for a model's attention in this dtype."""
    # In float32 on a CPU long spans are the flash kernel's, which knows no stems in front of them.
    flash = device.type == "cpu" and dtype == torch.float32
    return RaggedLayout.of(layout, device, joined=_JOINED, shorter=_FLASH if flash else None)


@functools.cache
def register() -> str:
    """Make it known to transformers; returns its name there."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, ragged_attention)
    return NAME
