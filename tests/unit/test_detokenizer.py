"""The text of tokens is what the tokenizer itself makes of them, by whichever way it is made."""

from __future__ import annotations

import string
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlx.core.detokenizer import _table, text_of
from rlx.embedded import MODEL_FOLDER


def made(decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    """A tokenizer of words that are split at spaces."""
    words = [*string.ascii_lowercase, "Ġ", "Ġ.", "Ġthe", "Ã¤", "Ã", "."]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, **options)


BYTES = AutoTokenizer.from_pretrained(MODEL_FOLDER)
ADDED = made(decoders.ByteLevel(), clean_up_tokenization_spaces=False, eos_token="<end>")
ADDED.add_tokens([AddedToken("so on"), AddedToken("<hidden>", special=True), AddedToken("ä")])


def own(tokenizer: Any, tokens: Any) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@given(st.lists(st.integers(0, len(BYTES) - 1), max_size=40))
def test_any_bytes_make_the_tokenizers_text(tokens: list[int]) -> None:
    assert _table(BYTES) is not None
    assert text_of(np.array(tokens, np.int32), BYTES) == own(BYTES, tokens)


@given(st.lists(st.integers(0, len(ADDED) - 1), max_size=20))
def test_special_tokens_are_skipped_and_other_added_ones_stand_for_themselves(
    tokens: list[int],
) -> None:
    assert _table(ADDED) is not None
    assert text_of(tokens, ADDED) == own(ADDED, tokens)


def test_tokens_beyond_the_vocabulary_are_no_text() -> None:
    tokens = [*BYTES("who", add_special_tokens=False)["input_ids"], len(BYTES) + 100]
    assert text_of(tokens, BYTES) == own(BYTES, tokens) == "who"


def test_tokens_that_are_none_are_the_tokenizers_error() -> None:
    with pytest.raises(OverflowError):
        own(BYTES, [-1])
    with pytest.raises(OverflowError):
        text_of([-1], BYTES)


@pytest.mark.parametrize(
    "tokenizer",
    [
        made(decoders.WordPiece()),
        made(decoders.Sequence([decoders.ByteLevel(), decoders.Strip("b", 1, 0)])),
        made(decoders.ByteLevel(), clean_up_tokenization_spaces=True),
    ],
    ids=["words", "sequence", "cleaned-up"],
)
def test_other_tokenizers_are_asked_themselves(tokenizer: Any) -> None:
    assert _table(tokenizer) is None
    tokens = list(range(len(tokenizer)))
    assert text_of(tokens, tokenizer) == own(tokenizer, tokens)
