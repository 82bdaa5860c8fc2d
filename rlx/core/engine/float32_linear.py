"""Linear layers in float32 on a CPU by oneDNN, in the place of the library that PyTorch asks.

PyTorch has MKL multiply float32 matrices, which on AMD's processors leaves half of their width
unused: 100 GFLOP/s a core of an EPYC with AVX-512, oneDNN 240. The numbers are float32 in both, and
differ in the last bits. oneDNN is what PyTorch's own compiler uses for it.

With y = x · Wᵀ + b: ∂x = ∂y · W, ∂W = ∂yᵀ · x, ∂b = Σ ∂y.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional


def quicken(model: nn.Module) -> int:
    """Have the linear layers of a model in float32 on a CPU multiply by oneDNN where there is one;
    returns how many. Layers of another class stay what they are."""
    if not _helps():
        return 0
    layers: list[Any] = [layer for layer in model.modules() if type(layer) is nn.Linear]
    mine = [layer for layer in layers if _fits(layer.weight)]
    for layer in mine:
        layer.forward = types.MethodType(_forward, layer)
    return len(mine)


@functools.cache
def _helps() -> bool:
    """Whether this PyTorch has oneDNN, and the processor what oneDNN is faster with."""
    return (
        torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


def _fits(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _forward(self: Any, x: Tensor) -> Tensor:
    """`nn.Linear.forward`."""
    fit = _fits(x) and _fits(self.weight) and x.numel()
    if not fit or torch.is_autocast_enabled("cpu"):
        return functional.linear(x, self.weight, self.bias)
    if not torch.is_grad_enabled():
        return _product(x, self.weight, self.bias)
    found: Tensor = _Linear.apply(x, self.weight, self.bias)
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            _product(upstream, weight.T) if by_x else None,
            weight_gradient(upstream, x) if by_weight else None,
            upstream.reshape(-1, upstream.shape[-1]).sum(0) if by_bias else None,
        )


def projected(x: Tensor, weight: Tensor) -> Tensor:
    """x […, k] · weightᵀ [k, n], of any dtype on any device; no gradient."""
    if _helps() and _fits(x) and _fits(weight) and x.numel():
        return _product(x, weight)
    return functional.linear(x, weight)


def weight_gradient(upstream: Tensor, x: Tensor) -> Tensor:
    """∂yᵀ · x [n, k] of ∂y […, n] and x […, k], of any dtype on any device."""
    above, below = (one.reshape(-1, one.shape[-1]) for one in (upstream, x))
    if not (_helps() and _fits(above) and _fits(below) and above.numel() and below.numel()):
        return above.T @ below
    # oneDNN copies what is on the left, so that is the narrow one.
    if above.shape[1] <= below.shape[1]:
        return _product(above.T, below.T)
    return _product(below.T, above.T).T


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x […, k] · weightᵀ [k, n] + bias [n] in float32, whatever their strides."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
