"""Sampling from logits: the processed distribution, and one token of it per row.

Legend: B rows, V vocabulary. The order of the filters and their ties are vLLM's: temperature, then
top-k (values equal to the k-th stay), then top-p on what is left (renormalised).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rlx.core.engine.interfaces import Sampling


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
    best = logprobs.argmax(-1)
    cumulated = logprobs.exp().cumsum(-1)
    target = (uniforms * cumulated[:, -1].double()).float()[:, None]
    # The first index whose cumulated probability is above the target never has probability 0.
    drawn = torch.searchsorted(cumulated, target, right=True)[:, 0]
    drawn = torch.where(drawn < logprobs.shape[-1], drawn, best)
    tokens = torch.where(greedy, best, drawn)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]
