"""Stop strings: an answer ends where its text has one, with the token in which it is complete.

The engine is not told of them, except where one is a token of its own: it samples on to the end of
the turn, and what came after the stop string is dropped as if it had never been sampled. The tokens
that stay are exactly those that an engine with stop strings would have given, with the same
log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlx.core.generation import Generation


def stop_token_ids(stop: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """Ids of the stop strings that are tokens of their own, which no other token can contain."""
    if not stop:  # asking a tokenizer for its additions takes longer than all the rest of a turn
        return ()
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return tuple(added[text] for text in stop if text in added)


def cut_at_stop(generation: Generation, stop: Sequence[str], tokenizer: Any) -> Generation:
    """The generation up to the first stop string; the same object where its text has none."""

    def stopped(count: int) -> bool:
        text = str(tokenizer.decode(tokens[:count], skip_special_tokens=False))
        return any(word in text for word in stop)

    tokens = [int(token) for token in generation.tokens]
    if not stopped(len(tokens)):
        return generation
    low, high = 0, len(tokens)  # not stopped after `low` tokens, stopped after `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return replace(
        generation,
        tokens=generation.tokens[:high],
        logprobs=generation.logprobs[:high],
        finish_reason="stop",
        versions=_first(generation.versions, high),
    )


def before_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The text up to its first stop string, and which one that is."""
    places = [(at, word) for word in stop if (at := text.find(word)) >= 0]
    if not places:
        return text, None
    at, word = min(places)
    return text[:at], word


def _first(versions: Sequence[tuple[int, int]], count: int) -> Sequence[tuple[int, int]]:
    """The stretches of the first `count` tokens."""
    kept = []
    for version, tokens in versions:
        if count > 0:
            kept.append((version, min(tokens, count)))
        count -= tokens
    return tuple(kept)
