"""`/v1/completions`: a text, or token ids, in; what the model writes on, out."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlx.core.episode import Episode, Reply
from rlx.plugins.agents.endpoint.chat import FINISH, usage
from rlx.plugins.agents.endpoint.requests import Asked, UnsupportedError, overrides
from rlx.plugins.agents.endpoint.texts import Texts, pieces


class CompletionAsked(Asked):
    """The fields of a completion request that are acted on."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    logprobs: int | None = None
    stream_options: dict[str, Any] | None = None


async def complete(asked: CompletionAsked, episode: Episode, texts: Texts) -> dict[str, Any]:
    """A `text_completion` object."""
    prompt = _one(asked.prompt)
    if asked.logprobs is not None and asked.logprobs > 1:
        raise UnsupportedError("logprobs", "only the sampled token's log-prob is known: logprobs=1")
    reply = await episode.complete(prompt, **overrides(episode, asked.max_tokens, asked.stop))
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [
            {
                "index": 0,
                "text": reply.text,
                "logprobs": None if asked.logprobs is None else _logprobs(reply, texts),
                "finish_reason": FINISH.get(reply.finish_reason, "stop"),
            }
        ],
        "usage": usage(reply),
    }


def chunks(whole: Mapping[str, Any], *, with_usage: bool) -> Iterator[str]:
    """A finished `text_completion` as the events of a stream."""
    (choice,) = whole["choices"]
    head = {name: value for name, value in whole.items() if name not in ("choices", "usage")}

    def event(text: str, **more: Any) -> str:
        part = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, **more}
        return f"data: {json.dumps({**head, 'choices': [part]})}\n\n"

    for part in pieces(choice["text"]):
        yield event(part)
    yield event("", finish_reason=choice["finish_reason"], logprobs=choice["logprobs"])
    if with_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': whole['usage']})}\n\n"
    yield "data: [DONE]\n\n"


def _one(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    if isinstance(prompt, str):
        found: Any = prompt
    elif prompt and isinstance(prompt[0], int):
        found = prompt
    elif len(prompt) == 1:
        found = prompt[0]
    else:
        raise UnsupportedError("prompt", f"one prompt at a time, not {len(prompt)}")
    if not found:
        raise UnsupportedError("prompt", "the prompt is empty")
    return found  # type: ignore[no-any-return]


def _logprobs(reply: Reply, texts: Texts) -> dict[str, Any]:
    tokens = texts.of_tokens(reply.tokens)
    offsets, at = [], 0
    for token in tokens:
        offsets.append(at)
        at += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [*reply.logprobs],
        "text_offset": offsets,
        "top_logprobs": None,
    }
