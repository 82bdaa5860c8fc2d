"""Norm, rotation and gated activation of a transformer's layer, in few passes over the memory.

    rms_norm(x)       = x · r · w,            r = (mean x² + ε)^−½
    rotated(x)        = x · cos + swap(x) · (−sin, sin),   swap(x₁, x₂) = (x₂, x₁)
    gated(g, u)       = silu(g) · u,          silu(g) = g · σ(g)

What is kept for the backward pass is what they were given, and r; the rest is computed again. In
bfloat16 a norm is rounded once, at its end; activations as PyTorch's own kernels do it.

Legend: T tokens, H features, I inner features; B rows, L tokens of a row, h heads, D features of
a head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from rlx.core.engine.float32_linear import projected, weight_gradient

_FLOATS = 2**18
"""Values of a float32 piece that is worked on at a time on a CPU, which its cache holds."""
_MANY_FLOATS = 2**28


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` […, H], weight [H] → […, H] in the wider dtype of both."""
    found: Tensor = _RmsNorm.apply(x, weight, eps)
    return found


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [B, h, L, D], cos and sin [B, L, D] → [B, h, L, D], laid out as [B, L, h, D]."""
    found: Tensor = _Rotation.apply(x, cos, sin)
    return found


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """[…, I] each."""
    found: Tensor = _Gate.apply(gate, up)
    return found


def gated_projection(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """gated(gate, up) · weightᵀ without keeping the product: […, I], weight [H, I] → […, H]."""
    found: Tensor = _GatedProjection.apply(gate, up, weight)
    return found


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        dtype = torch.promote_types(x.dtype, weight.dtype)
        output = torch.empty(flat.shape, dtype=dtype, device=x.device)
        inverse = torch.empty(len(flat), 1, dtype=torch.float32, device=x.device)
        wide_weight = weight.float()
        for rows in _pieces(flat):
            wide = _own(flat[rows])
            norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
            scale = norm.square_().div_(flat.shape[1]).add_(eps).rsqrt_()
            inverse[rows] = scale
            output[rows] = wide.mul_(scale).mul_(wide_weight)
        ctx.save_for_backward(x, weight, inverse)
        return output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        flat, above = x.reshape(-1, x.shape[-1]), upstream.reshape(-1, x.shape[-1])
        by_x = torch.empty_like(flat)
        by_weight = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
        wide_weight = weight.float()
        for rows in _pieces(flat):
            scale = inverse[rows]
            normed, slope = _own(flat[rows]).mul_(scale), _own(above[rows])
            if ctx.needs_input_grad[1]:
                by_weight += (slope * normed).sum(0)
            slope.mul_(wide_weight)
            share = torch.linalg.vecdot(slope, normed).div_(flat.shape[1])
            by_x[rows] = slope.addcmul_(normed, share[:, None], value=-1).mul_(scale)
        return by_x.view(x.shape), by_weight.to(weight.dtype), None


def _own(piece: Tensor) -> Tensor:
    """In float32, and to be written on."""
    return piece.to(torch.float32, copy=True)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, _signed(sin))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        back = _signed(sin).roll(sin.shape[-1] // 2, -1)
        return _rotate(upstream, cos, back), None, None


def _signed(sin: Tensor) -> Tensor:
    first, second = sin.chunk(2, -1)
    return torch.cat([-first, second], -1)


def _rotate(x: Tensor, cos: Tensor, signed: Tensor) -> Tensor:
    flat = x.transpose(1, 2)
    swapped = flat.roll(flat.shape[-1] // 2, -1)
    return swapped.mul_(signed[:, :, None]).addcmul_(flat, cos[:, :, None]).transpose(1, 2)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return _gate_backward(upstream * up, gate), functional.silu(gate).mul_(upstream)


class _GatedProjection(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        return projected(functional.silu(gate).mul_(up), weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, weight = ctx.saved_tensors
        activated, by_weight = functional.silu(gate), None
        if ctx.needs_input_grad[2]:
            by_weight = weight_gradient(upstream, activated * up)
        by_inner = projected(upstream, weight.T)
        by_up = activated.mul_(by_inner)
        return _gate_backward(by_inner.mul_(up), gate), by_up, by_weight


def _gate_backward(upstream: Tensor, gate: Tensor) -> Tensor:
    found: Tensor = torch.ops.aten.silu_backward(upstream, gate)
    return found


def _pieces(flat: Tensor) -> Iterator[slice]:
    """Rows of `flat` [T, H] that are worked on at a time."""
    most = _FLOATS if flat.device.type == "cpu" else _MANY_FLOATS
    step = max(1, most // flat.shape[1])
    return (slice(start, start + step) for start in range(0, len(flat), step))
