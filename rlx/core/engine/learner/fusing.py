"""Fused operations in the place of a model's own, where they are known to compute the same.

A module is recognised by its parts, and given another `forward` only after both were compared on
random numbers: norms and rotations in float32, where a difference of formula can't hide behind
rounding. The whole model is compared at the end. What is not recognised stays as it is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.attention import close, hidden_states
from rlx.core.engine.learner.fused_ops import gated, gated_projection, rms_norm, rotated
from rlx.core.errors import UsageError

_ROTATION = "apply_rotary_pos_emb"
"""Name of transformers' function in the models that rotate queries and keys by halves."""
_LINEAR = ("gate_proj", "up_proj", "down_proj")


def fuse(model: Any, settings: LearnerConfig, device: torch.device) -> None:
    """Fuse what is recognised in a transformers model, as `learner.fused` asks for.

    Raises:
        UsageError: it must, and there is nothing, or the model then computes something else.
    """
    wanted = settings.fused
    if wanted == "off" or (wanted == "auto" and (settings.liger or device.type != "cpu")):
        return
    before = _states(model)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        for module, forward in list(_replacements(model)):
            module.forward = types.MethodType(forward, module)
    if fused_modules(model) and close(_states(model), before):
        return
    for module in _fused(model):
        del module.forward
    if wanted == "on":
        raise UsageError(
            f"{type(model).__name__} has no layers that rlx can fuse.",
            where="learner.fused",
            fix="learner.fused: auto",
        )


def fused_modules(model: nn.Module) -> int:
    """How many of its modules compute by fused operations."""
    return sum(1 for _ in _fused(model))


def _fused(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        forward = vars(module).get("forward")
        if isinstance(forward, types.MethodType) and hasattr(forward.__func__, "rlx_fused"):
            yield module


@torch.no_grad()
def _states(model: Any) -> Tensor:
    """Hidden states [n, H] of a short sequence."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    row = torch.arange(1, 12)[None] * 7 % vocabulary
    return hidden_states(model.base_model, row, torch.arange(row.shape[1])[None])[0]


def _replacements(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
    """Modules with the `forward` that computes the same."""
    rotations: dict[Any, Callable[..., Any] | None] = {}
    for module in model.modules():
        if _is_norm(module):
            yield module, _norm_forward
        elif _is_gated(module):
            yield module, _gated_forward
        else:
            code = type(module).forward
            if code not in rotations:
                rotations[code] = _with_our_rotation(code)
            replaced = rotations[code]
            if replaced is not None:
                yield module, replaced


def _marked(function: Any) -> Any:
    function.rlx_fused = True
    return function


@_marked
def _norm_forward(self: Any, hidden_states: Tensor) -> Tensor:
    return rms_norm(hidden_states, self.weight, _epsilon(self))


@_marked
def _gated_forward(self: Any, x: Tensor) -> Tensor:
    gate, up, down = self.gate_proj(x), self.up_proj(x), self.down_proj
    if is_bare(down):
        return gated_projection(gate, up, down.weight)
    found: Tensor = down(gated(gate, up))
    return found


def is_bare(layer: Any) -> bool:
    """Whether calling it does nothing but multiply by its weight: no adapter, no bias, no hook that
    fetches the weight from other ranks."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks)
    return type(layer) is nn.Linear and layer.bias is None and not any(hooks)


def _rotate_both(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """In the place of transformers' function: q and k [B, h, L, D], cos and sin [B, L, D]."""
    if unsqueeze_dim != 1:
        raise ValueError("heads are not the second axis")
    return rotated(q, cos, sin), rotated(k, cos, sin)


def _epsilon(norm: Any) -> float:
    return float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0)


def _is_norm(module: Any) -> bool:
    weights = list(module.parameters(recurse=False))
    if not type(module).__name__.endswith("RMSNorm") or list(module.children()):
        return False
    if len(weights) != 1 or weights[0].ndim != 1 or getattr(module, "weight", None) is None:
        return False
    x = torch.randn(3, len(module.weight)).mul_(_epsilon(module) ** 0.5 * 2)
    return _same(module(x), _norm_forward(module, x), 1e-5)


def _is_gated(module: Any) -> bool:
    linear = [getattr(module, name, None) for name in _LINEAR]
    activation = getattr(module, "act_fn", None)
    if not callable(activation) or any(type(layer) is not nn.Linear for layer in linear):
        return False
    if {name for name, _ in module.named_children()} - {*_LINEAR, "act_fn"}:
        return False
    points = torch.linspace(-9, 9, 64)
    if not _same(activation(points), functional.silu(points), 1e-6):
        return False
    weight = module.gate_proj.weight
    x = torch.randn(3, weight.shape[1], dtype=weight.dtype)
    tolerance = 1e-5 if weight.dtype == torch.float32 else 0.02
    return _same(module(x), _gated_forward(module, x), tolerance)


def _with_our_rotation(forward: Any) -> Callable[..., Any] | None:
    """`forward` with another rotation, or None where it has none that is known.

    The function's code is taken as it is: what a model does around its rotation stays its own.
    """
    code, around = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    theirs = around.get(_ROTATION)
    if code is None or _ROTATION not in code.co_names or not callable(theirs):
        return None
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 3, 8)
    angles = torch.randn(1, 3, 4).repeat(1, 1, 2)
    try:
        found = theirs(q, k, angles.cos(), angles.sin())
    except (TypeError, ValueError, RuntimeError):
        return None
    ours = _rotate_both(q, k, angles.cos(), angles.sin())
    if not all(_same(one, other, 1e-5) for one, other in zip(found, ours, strict=True)):
        return None
    replaced = types.FunctionType(
        code,
        {**around, _ROTATION: _rotate_both},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    replaced.__kwdefaults__ = forward.__kwdefaults__
    return _marked(replaced)


def _same(ours: Any, theirs: Tensor, tolerance: float) -> bool:
    if not isinstance(ours, Tensor) or (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return False
    gap = (ours.float() - theirs.float()).norm()
    return bool(gap <= tolerance * theirs.float().norm())
