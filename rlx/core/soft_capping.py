"""Attention whose scores are soft-capped (Gemma 2): which of transformers' functions compute it.

score = cap · tanh(q · k · scale / cap)

Gemma Team 2024, "Gemma 2", https://arxiv.org/abs/2408.00118, section 2.
"""

from __future__ import annotations

from typing import Any


def soft_capped(config: Any) -> bool:
    """Whether a model of this transformers configuration caps its attention's scores."""
    return bool(getattr(config.get_text_config(), "attn_logit_softcapping", None))


def exact_attention(config: Any) -> str | None:
    """The name to load such a model with; None: transformers' own choice is exact.

    Its choice is `sdpa` here too, which leaves the cap out without a word.
    """
    return "eager" if soft_capped(config) else None
