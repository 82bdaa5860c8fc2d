"""Log-probs and entropy on chosen positions only, so that [T, V] logits never exist.

logprob[i] = z[i, target[i]] − logsumexp(z[i]),   z = logits(hidden) / temperature, in float32
entropy[i] = logsumexp(z[i]) − Σ_v softmax(z[i])_v · z[i, v]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Head = Callable[[Tensor], Tensor]


def token_logprobs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    chunks: int,
    entropy_gradient: bool,
    entropy: bool = True,
) -> tuple[Tensor, ...]:
    """Log-probs [n] and entropies [n], float32.

    Args:
        head: hidden states [m, H] → logits [m, V].
        hidden: [n, H], the states that predict `targets`.
        targets: [n] int64.
        chunks: number of pieces of the projection; with more than one, each is recomputed backward.
        entropy_gradient: whether the entropy carries a gradient; without, it costs one pass over
            the logits and no memory.
        entropy: false leaves the entropies out, and that pass.
    """

    def piece(part: Tensor, wanted: Tensor) -> tuple[Tensor, ...]:
        logits = head(part).float() / temperature
        return _logprobs(logits, wanted, entropy_gradient=entropy_gradient, entropy=entropy)

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


def _logprobs(
    logits: Tensor, targets: Tensor, *, entropy_gradient: bool, entropy: bool
) -> tuple[Tensor, ...]:
    normaliser = torch.logsumexp(logits, -1)
    logprobs = logits.gather(-1, targets[:, None])[:, 0] - normaliser
    if not entropy:
        return (logprobs,)
    # Last, and without gradient unless asked: a recomputation stops before it.
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        probabilities = (logits - normaliser[:, None]).exp()
        entropies = normaliser - torch.linalg.vecdot(probabilities, logits)
    return logprobs, entropies
