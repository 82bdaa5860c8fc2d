"""What an engine is asked for and what it answers, as agents' episodes see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlx.core.rollouts import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine samples. Log-probs are always of the processed (tempered) distribution."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; the reported log-probs are then those of temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: tuple[int, ...] = ()
    """Beside the tokenizer's end-of-sequence token; the stop token is part of the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """The reply to one request."""

    request_id: int
    tokens: np.ndarray
    """[n] int32, sampled tokens with the end-of-sequence or stop token included."""
    logprobs: np.ndarray
    """[n] float32."""
    finish_reason: FinishReason
    """`stop`, `length` or `abort`."""
    version: int
    """Policy version at the start of the request."""
    versions: Sequence[tuple[int, int]] = ()
    """(policy version, tokens) in order, when the weights were replaced meanwhile; else empty."""
