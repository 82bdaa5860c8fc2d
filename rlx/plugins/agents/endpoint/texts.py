"""What the formats need of the tokenizer: texts of tokens, tool calls in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.core.episode import Reply
from rlx.core.tool_calls import ToolCallParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The tokenizer and the format of the model's tool calls."""

    tokenizer: Any
    parse: ToolCallParser

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        tokenizer = self.tokenizer
        if not hasattr(tokenizer, "chat_template"):  # a stand-in, which has one way to render
            return hasattr(tokenizer, "apply_chat_template")
        return bool(tokenizer.chat_template)

    def of_tokens(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token; a token that is part of a character shows a replacement."""
        return [str(self.tokenizer.decode([token])) for token in tokens]

    def logprobs(self, reply: Reply) -> list[dict[str, Any]]:
        """The log-prob of each sampled token, the end-of-sequence token included."""
        return [
            {"token": text, "logprob": value, "bytes": [*text.encode()], "top_logprobs": []}
            for text, value in zip(self.of_tokens(reply.tokens), reply.logprobs, strict=False)
        ]


def pieces(text: str) -> Iterator[str]:
    """A text word by word, white space with the word that follows."""
    return (match.group() for match in re.finditer(r"\s*\S+|\s+", text))
