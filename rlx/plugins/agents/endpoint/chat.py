"""`/v1/chat/completions`: a conversation in, one message out, in OpenAI's format."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx.core.episode import Episode, Reply
from rlx.core.rollouts import Message
from rlx.core.tool_calls import ToolCalls
from rlx.plugins.agents.endpoint.requests import Asked, UnsupportedError, overrides
from rlx.plugins.agents.endpoint.texts import Texts, pieces

NO_CHOICE = "the model can't be made to call a tool: auto or none"
FINISH = {"stop": "stop", "length": "length"}


class ChatAsked(Asked):
    """The fields of a chat request that are acted on."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    logprobs: bool | None = None
    stream_options: dict[str, Any] | None = None


async def answer(asked: ChatAsked, episode: Episode, texts: Texts) -> dict[str, Any]:
    """A `chat.completion` object."""
    most = asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens
    reply = await reply_to(
        episode,
        texts,
        messages=asked.messages,
        tools=_tools(asked),
        options=overrides(episode, most, asked.stop),
    )
    message = dict(reply.message)
    if not message["content"] and message.get("tool_calls"):
        message["content"] = None
    return {
        "id": f"chatcmpl-{secrets.token_hex(12)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked.model,
        "choices": [
            {
                "index": 0,
                "message": {**message, "refusal": None},
                "logprobs": {"content": texts.logprobs(reply)} if asked.logprobs else None,
                "finish_reason": finish_reason(reply),
            }
        ],
        "usage": usage(reply),
    }


def chunks(whole: Mapping[str, Any], *, with_usage: bool) -> Iterator[str]:
    """A finished `chat.completion` as the events of a stream."""
    (choice,) = whole["choices"]
    head = {name: whole[name] for name in ("id", "created", "model")}

    def event(delta: Mapping[str, Any], finish: str | None = None, **more: Any) -> str:
        choices = [{"index": 0, "delta": dict(delta), "finish_reason": finish, **more}]
        return _event({**head, "object": "chat.completion.chunk", "choices": choices})

    message = choice["message"]
    yield event({"role": "assistant", "content": ""})
    if choice["logprobs"]:
        for part in choice["logprobs"]["content"]:
            yield event({"content": part["token"]}, logprobs={"content": [part]})
    else:
        for part in pieces(message["content"] or ""):
            yield event({"content": part})
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield event({"tool_calls": [{"index": index, **call}]})
    yield event({}, choice["finish_reason"])
    if with_usage:
        empty = {**head, "object": "chat.completion.chunk", "choices": []}
        yield _event({**empty, "usage": whole["usage"]})
    yield "data: [DONE]\n\n"


async def reply_to(
    episode: Episode,
    texts: Texts,
    *,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> Reply:
    """Have the policy answer; raises RefusedError for messages that can't be shown to it."""
    if not messages:
        raise UnsupportedError("messages", "messages is empty")
    if not texts.has_chat_template:
        raise UnsupportedError(
            "messages",
            "the model has no chat template: ask /v1/completions with a text, or train a model "
            "whose tokenizer has one",
        )

    def show(text: str) -> Message:
        return shown(texts.parse(text) if tools else ToolCalls(content=text))

    return await episode.answer(messages, tools=tools, show=show, **options)


def shown(found: ToolCalls) -> Message:
    """The assistant's message, as the program is given it."""
    message: dict[str, Any] = {"role": "assistant", "content": found.content}
    if found.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in found.calls
        ]
    return message


def finish_reason(reply: Reply) -> str:
    """OpenAI's word for it."""
    if reply.message.get("tool_calls"):
        return "tool_calls"
    return FINISH.get(reply.finish_reason, "stop")


def usage(reply: Reply) -> dict[str, int]:
    """Tokens of the prompt and of the answer."""
    sampled = len(reply.tokens)
    return {
        "prompt_tokens": reply.prompt_length,
        "completion_tokens": sampled,
        "total_tokens": reply.prompt_length + sampled,
    }


def _tools(asked: ChatAsked) -> list[dict[str, Any]] | None:
    """The tools that the model may call."""
    choice = asked.tool_choice
    if choice not in (None, "auto", "none"):
        raise UnsupportedError(
            "tool_choice", "the model can't be made to call a tool: auto or none"
        )
    return None if choice == "none" else asked.tools


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
