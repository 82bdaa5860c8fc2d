"""Sampling from logits: the processed distribution, and one token of it per row.

Legend: B rows, V vocabulary. The order of the filters and their ties are vLLM's: temperature, then
top-k (values equal to the k-th stay), then top-p on what is left (renormalised).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from rlx.core.engine.interfaces import Sampling

_BLOCK = 256


def processed_logprobs(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Log-probs [B, V] float32 that each row samples from; greedy rows have those at temperature 1.

    Args:
        logits: [B, V], any float dtype.
        samplings: B of them.
    """
    logits = logits.float()
    temperatures = [item.temperature or 1.0 for item in samplings]
    if any(value != 1.0 for value in temperatures):
        logits = logits / torch.tensor(temperatures, device=logits.device)[:, None]
    rows = [
        row
        for row, item in enumerate(samplings)
        if item.temperature and (item.top_k or item.top_p < 1)
    ]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        kept = _filtered(logits[index], [samplings[row] for row in rows])
        logits = logits.index_copy(0, index, kept)
    return logits.log_softmax(-1)


def _filtered(logits: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """Logits [B, V] with −inf where top-k or top-p exclude a token."""
    vocabulary = logits.shape[-1]
    ordered, order = logits.sort(dim=-1)
    keep = [min(item.top_k or vocabulary, vocabulary) for item in samplings]
    first = torch.tensor([vocabulary - count for count in keep], device=logits.device)
    smallest = ordered.gather(1, first[:, None])
    ordered = ordered.masked_fill(ordered < smallest, -torch.inf)
    excluded = ordered.softmax(-1).cumsum(-1)
    cut = torch.tensor([1 - item.top_p for item in samplings], device=logits.device)[:, None]
    masked = excluded <= cut
    masked[:, -1] = False
    ordered = ordered.masked_fill(masked, -torch.inf)
    return torch.empty_like(logits).scatter_(1, order, ordered)


def sample(
    logprobs: torch.Tensor, uniforms: torch.Tensor, greedy: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token [B] int64 per row and its log-prob [B] float32, by inversion of the distribution.

    Args:
        logprobs: [B, V] float32, normalised, −inf for excluded tokens.
        uniforms: [B] float64 in [0, 1).
        greedy: [B] bool, rows that take the most likely token.
    """
    tokens = draw(logprobs, uniforms)
    if greedy.any():
        tokens = torch.where(greedy, logprobs.argmax(-1), tokens)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


def draw(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """One token [B] int64 per row, by inversion of the distribution.

    First among blocks of tokens, then in the block that was drawn, so that each probability is
    read once. A token of probability 0 is never drawn.

    Args:
        logprobs: [B, V] float32, −inf for excluded tokens.
        uniforms: [B] float64 in [0, 1).
    """
    rows, vocabulary = logprobs.shape
    probabilities = logprobs.exp()
    if missing := -vocabulary % _BLOCK:
        probabilities = functional.pad(probabilities, (0, missing))
    blocks = probabilities.view(rows, -1, _BLOCK)
    block, left = _invert(blocks.sum(-1), uniforms)
    token, _ = _invert(blocks[torch.arange(rows, device=logprobs.device), block], left)
    return block * _BLOCK + token


def _invert(weights: torch.Tensor, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index [B] in each row of weights [B, n] at which a share [B] of the row's sum is reached,
    and which share of that index's own weight it takes to get there."""
    cumulated = weights.double().cumsum(-1)
    target = (shares * cumulated[:, -1])[:, None]
    # The first index whose cumulated weight is above the target never has weight 0.
    index = torch.searchsorted(cumulated, target, right=True)
    # Rounding may put the target at the sum itself: then the heaviest one.
    index = torch.where(index < weights.shape[-1], index, weights.argmax(-1, keepdim=True))
    own = weights.gather(1, index).double()
    before = cumulated.gather(1, index) - own
    return index[:, 0], ((target - before) / own).clamp(0, 1)[:, 0]
