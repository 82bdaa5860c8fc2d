"""Stop strings: an answer ends where its text has one, with the token in which it is complete.

The engine knows token ids only, and is told of a stop string where it is a token of its own. For
any other the answer is sampled in pieces of growing length; what came after the stop string is
dropped as if it had never been sampled. The tokens that stay are distributed as those of an engine
with stop strings, with the same log-probs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.core.generation import Generation, Sampling
from rlx.core.turns import Generate

_FIRST_PIECE = 32
"""Tokens."""


def stop_token_ids(stop: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """Ids of the stop strings that are tokens of their own, which no other token can contain."""
    added: dict[str, int] = getattr(tokenizer, "get_added_vocab", dict)()
    return tuple(added[text] for text in stop if text in added)


async def until_stop(
    generate: Generate,
    prompt: list[int],
    sampling: Sampling,
    seed: int,
    stop: Sequence[str],
    tokenizer: Any,
) -> Generation:
    """What the policy writes after `prompt`, up to the first of the texts `stop`."""
    if len(stop_token_ids(stop, tokenizer)) == len(stop):  # the engine stops by itself
        return cut_at_stop(await generate(prompt, sampling, seed), stop, tokenizer)
    whole: Generation | None = None
    for number, length in enumerate(piece_lengths(sampling.max_new_tokens)):
        call = replace(sampling, max_new_tokens=length)
        piece = await generate([*prompt], call, _piece_seed(seed, number))
        prompt += [int(token) for token in piece.tokens]
        whole = joined(whole, piece)
        cut = cut_at_stop(whole, stop, tokenizer)
        if cut is not whole or piece.finish_reason != "length":
            return cut
    assert whole is not None, "sampling.max_new_tokens is at least 1"
    return whole


def piece_lengths(total: int) -> Iterator[int]:
    """Lengths of the pieces of an answer of at most `total` tokens: no more than as many tokens as
    are kept are sampled for nothing."""
    length = _FIRST_PIECE
    while total > 0:
        yield min(length, total)
        total -= length
        length *= 2


def joined(first: Generation | None, second: Generation) -> Generation:
    """Two pieces of an answer as one."""
    if first is None:
        return second
    stretches = [*_stretches(first), *_stretches(second)]
    return replace(
        second,
        tokens=np.concatenate([first.tokens, second.tokens]),
        logprobs=np.concatenate([first.logprobs, second.logprobs]),
        version=first.version,
        versions=stretches if len({version for version, _ in stretches}) > 1 else (),
    )


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


def _stretches(generation: Generation) -> Sequence[tuple[int, int]]:
    return generation.versions or ((generation.version, len(generation.tokens)),)


def _first(versions: Sequence[tuple[int, int]], count: int) -> Sequence[tuple[int, int]]:
    """The stretches of the first `count` tokens."""
    kept = []
    for version, tokens in versions:
        if count > 0:
            kept.append((version, min(tokens, count)))
        count -= tokens
    return tuple(kept)


def _piece_seed(seed: int, number: int) -> int:
    """The first piece's is the turn's own; the others must not draw the same numbers again."""
    if number == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1
