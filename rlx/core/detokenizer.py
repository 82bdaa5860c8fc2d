"""The text of token ids as the tokenizer's own `decode` gives it, with special tokens skipped.

The tokens of a byte-level BPE (GPT-2's; Llama 3's, Qwen's and most others of today) stand for fixed
runs of bytes, and the text of a sequence is what its bytes say in UTF-8. `decode` makes a string of
each token and asks whether it is special, which took the driver a third to a half of all its time
for a rollout; here the bytes of all tokens are looked up at once, four to eight times as fast.

Byte-level BPE: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", 2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np


def text_of(tokens: Sequence[int] | np.ndarray, tokenizer: Any) -> str:
    """`tokenizer.decode(tokens, skip_special_tokens=True)`."""
    table = _table(tokenizer)
    if table is not None:
        # Unsigned, as NumPy takes a negative index for one from the end.
        ids = np.asarray(tokens).astype(np.uint32)
        try:
            return _joined(table, ids)
        except IndexError:
            pass  # ids beyond the vocabulary, which models with padded embeddings may sample
    # transformers looks at the type of each item of a list, which costs as much as decoding it.
    return str(tokenizer.decode(np.asarray(tokens), skip_special_tokens=True))


def _joined(table: np.ndarray, ids: np.ndarray) -> str:
    return b"".join(table[ids].tolist()).decode("utf-8", "replace")


@functools.lru_cache(maxsize=4)
def _table(tokenizer: Any) -> np.ndarray | None:
    """[V] objects, the bytes of each token, none of special ones; None for other tokenizers.

    Nobody is taken at their word: the whole vocabulary, forwards and backwards, and a text that
    transformers' "clean-up" would change have to come out as the tokenizer's `decode` has them.
    """
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    if type(decoder).__name__ != "ByteLevel":
        return None
    byte_of, special = _alphabet(), _special(tokenizer)
    table = np.full(len(tokenizer), b"", object)
    for token, number in tokenizer.get_vocab().items():
        if number >= len(table):  # the numbers have gaps
            return None
        if token not in special:
            table[number] = _bytes(token, byte_of)
    every = np.arange(len(table))
    spaced = tokenizer("it 's , do n't . no ? oh !", add_special_tokens=False)["input_ids"]
    same = all(
        tokenizer.decode(ids, skip_special_tokens=True) == _joined(table, ids)
        for ids in (every, every[::-1], np.asarray(spaced, np.int64))
    )
    return table if same else None


def _bytes(token: str, byte_of: dict[str, int]) -> bytes:
    """A token with any other character, an added one with a space say, stands for itself."""
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:
        return token.encode()


def _special(tokenizer: Any) -> set[str]:
    return {one.content for one in tokenizer.added_tokens_decoder.values() if one.special}


def _alphabet() -> dict[str, int]:
    """The byte that each character of a token stands for: printable ones of Latin-1 are themselves,
    the others are the characters from 256 on, in their order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
