"""Log-probs and entropy on chosen positions only, so that [T, V] logits never exist.

logprob[i] = z[i, target[i]] − logsumexp(z[i]),   z = logits(hidden) / temperature, in float32
entropy[i] = logsumexp(z[i]) − Σ_v softmax(z[i])_v · z[i, v]

Of the vocabulary's width only the logits are kept, in the model's dtype: float32 exists for a few
rows at a time, and with p = softmax(z), g and h the gradients of log-prob and entropy, the gradient

∂z[i, v] = g[i] · (1[v = target[i]] − p_v) − h[i] · p_v · (log p_v + entropy[i]),

is written over the logits. Behind a head that is a bare product with a weight W [V, H] and without
a gradient of the entropy, q[i] = 1[target[i]] − p[i] is written over them already in the forward
pass, and the backward pass only multiplies, with the scale of a row on the narrow side:

∂hidden[i] = g[i] · q[i] W,   ∂W = qᵀ (g · hidden).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rlx.core.engine.float32_linear import projected, weight_gradient

Head = Callable[[Tensor], Tensor]
LOG2_E = math.log2(math.e)
"""A CPU has a fast exponential to base 2 only."""
_FLOATS = {"cpu": 2**19}
_MANY_FLOATS = 2**26
"""Values of the float32 pieces: on a CPU what its cache holds, elsewhere what keeps it busy."""


def token_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunks: int,
    entropy_gradient: bool,
    entropy: bool = True,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs [n] and entropies [n], float32.

    Args:
        head: hidden states [m, H] → logits [m, V].
        hidden: [n, H], the states that predict `targets`.
        targets: [n] int64.
        chunks: number of pieces of the projection; with more than one, each is recomputed backward.
        entropy_gradient: whether the entropy carries a gradient.
        entropy: false leaves the entropies out.
        weight: [V, H] of a head that does nothing but multiply by it.
    """

    def piece(part: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        if weight is not None and not (entropy and entropy_gradient):
            trained = torch.is_grad_enabled()
            found = _Projected.apply(part, weight, wanted, temperature, entropy, trained)
            return tuple(found) if entropy else (found[0],)
        logits = head(part)
        # The gradient is written over what the head made, never over what it was given.
        owned = logits.clone() if logits.is_leaf and logits.requires_grad else logits
        answers = _Logprobs.apply(owned, wanted, temperature, entropy, entropy_gradient)
        return tuple(answers) if entropy else (answers[0],)

    if chunks == 1:
        return piece(hidden, targets)
    recompute = torch.is_grad_enabled()
    pieces = [
        checkpoint(piece, part, wanted, use_reentrant=False) if recompute else piece(part, wanted)
        for part, wanted in zip(
            hidden.tensor_split(chunks), targets.tensor_split(chunks), strict=True
        )
    ]
    return tuple(torch.cat(answers) for answers in zip(*pieces, strict=True))


def _softmax(
    logits: Tensor, targets: Tensor, temperature: float, entropy: bool, *, overwrite: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [m, V] → log-probs [m], entropies [m] (zeros where not wanted), log-sums [m].

    Args:
        overwrite: write 1[v = target[i]] − p_v over the logits.
    """
    normaliser = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    logprobs, entropies = torch.empty_like(normaliser), torch.zeros_like(normaliser)
    for rows in _pieces(logits):
        z, wanted = logits[rows].float(), targets[rows, None]
        if temperature != 1.0:
            z = z / temperature
        top = z.amax(-1)
        weights = (z - top[:, None]).mul_(LOG2_E).exp2_()
        total = weights.sum(-1)
        normaliser[rows] = total.log() + top
        logprobs[rows] = z.gather(-1, wanted)[:, 0] - normaliser[rows]
        if entropy:
            entropies[rows] = normaliser[rows] - torch.linalg.vecdot(weights, z) / total
        if overwrite:
            weights.mul_(-total.reciprocal()[:, None])
            weights.scatter_add_(-1, wanted, torch.ones_like(top)[:, None])
            logits[rows] = weights
    return logprobs, entropies, normaliser


class _Projected(torch.autograd.Function):
    """Hidden states [m, H], weight [V, H] → log-probs [m], entropies [m] without a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        trained: bool,
    ) -> tuple[Tensor, Tensor]:
        logits = projected(hidden, weight)
        logprobs, entropies, _ = _softmax(logits, targets, temperature, entropy, overwrite=trained)
        if trained:
            ctx.save_for_backward(hidden, weight, logits)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprob: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, slope = ctx.saved_tensors
        scale = (by_logprob / ctx.temperature)[:, None]
        by_hidden = by_weight = None
        if ctx.needs_input_grad[0]:
            by_hidden = (projected(slope, weight.T).float() * scale).to(hidden.dtype)
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(slope, (hidden.float() * scale).to(hidden.dtype))
        return by_hidden, by_weight, None, None, None, None


class _Logprobs(torch.autograd.Function):
    """Logits [m, V] → log-probs [m], entropies [m] (zeros where not wanted)."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        entropy: bool,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normaliser = _softmax(logits, targets, temperature, entropy)
        ctx.save_for_backward(logits, targets, normaliser, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        if not (entropy and entropy_gradient):
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, by_logprob: Tensor | None, by_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        logits, targets, normaliser, entropies = ctx.saved_tensors
        if by_logprob is None:
            by_logprob = torch.zeros_like(normaliser)
        for rows in _pieces(logits):
            piece = logits[rows]
            gradient = piece.float()  # float32 logits themselves, or a copy
            if ctx.temperature != 1.0:
                gradient.div_(ctx.temperature)
            gradient.sub_(normaliser[rows, None])
            wanted = by_logprob[rows, None]
            if by_entropy is None:
                gradient.mul_(LOG2_E).exp2_().mul_(-wanted)
            else:
                slope = (gradient + entropies[rows, None]).mul_(-by_entropy[rows, None])
                gradient.mul_(LOG2_E).exp2_().mul_(slope.sub_(wanted))
            gradient.scatter_add_(-1, targets[rows, None], wanted)
            if ctx.temperature != 1.0:
                gradient.div_(ctx.temperature)
            if gradient.dtype != piece.dtype:
                piece.copy_(gradient)
        return logits, None, None, None, None


def _pieces(logits: Tensor) -> Iterator[slice]:
    """Rows of `logits` that are worked on at a time."""
    count, width = logits.shape
    step = max(1, _FLOATS.get(logits.device.type, _MANY_FLOATS) // max(width, 1))
    return (slice(start, start + step) for start in range(0, count, step))
