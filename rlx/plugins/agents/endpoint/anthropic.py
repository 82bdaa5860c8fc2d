"""`/v1/messages`: the same conversations in Anthropic's format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx.core.episode import Episode, Reply
from rlx.core.messages import message_text
from rlx.core.rollouts import Message
from rlx.plugins.agents.endpoint.chat import reply_to
from rlx.plugins.agents.endpoint.requests import Asked, UnsupportedError, overrides
from rlx.plugins.agents.endpoint.texts import Texts, pieces


class MessagesAsked(Asked):
    """The fields of a request that are acted on."""

    messages: list[dict[str, Any]]
    max_tokens: int
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: list[str] | None = None


async def answer(asked: MessagesAsked, episode: Episode, texts: Texts) -> dict[str, Any]:
    """A `message` object."""
    reply = await reply_to(
        episode,
        texts,
        messages=_conversation(asked),
        tools=_tools(asked),
        options=overrides(episode, asked.max_tokens, asked.stop_sequences),
    )
    return {
        "id": f"msg_{secrets.token_hex(12)}",
        "type": "message",
        "role": "assistant",
        "model": asked.model,
        "content": _content(reply),
        "stop_reason": _stop_reason(reply),
        "stop_sequence": reply.stop,
        "usage": {"input_tokens": reply.prompt_length, "output_tokens": len(reply.tokens)},
    }


def events(whole: Mapping[str, Any]) -> Iterator[str]:
    """A finished `message` as the events of a stream."""
    start = {**whole, "content": [], "stop_reason": None}
    yield _event("message_start", message=start)
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            opening: Mapping[str, Any] = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": part} for part in pieces(block["text"])]
        else:
            opening = {**block, "input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": json.dumps(block["input"])}]
        yield _event("content_block_start", index=index, content_block=opening)
        for delta in deltas:
            yield _event("content_block_delta", index=index, delta=delta)
        yield _event("content_block_stop", index=index)
    delta = {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    yield _event("message_delta", delta=delta, usage=whole["usage"])
    yield _event("message_stop")


def _conversation(asked: MessagesAsked) -> list[Message]:
    """The system prompt and the messages, in the form that chat templates know."""
    system = [{"role": "system", "content": _text(asked.system)}] if asked.system else []
    return [*system, *(part for message in asked.messages for part in _messages(message))]


def _messages(message: Mapping[str, Any]) -> list[Message]:
    """One message; results of tools are messages of their own."""
    content = message.get("content")
    if not isinstance(content, list):
        return [message]
    of: dict[str, list[Mapping[str, Any]]] = {"tool_use": [], "tool_result": [], "text": []}
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind in ("thinking", "redacted_thinking"):
            continue
        if kind not in of:
            raise UnsupportedError("messages", f"content of the type {kind!r} can't be shown")
        of[str(kind)].append(block)
    found: list[Message] = [
        {
            "role": "tool",
            "tool_call_id": block.get("tool_use_id"),
            "content": _text(block.get("content")),
        }
        for block in of["tool_result"]
    ]
    if of["text"] or of["tool_use"]:
        calls = [
            {
                "id": block.get("id"),
                "type": "function",
                "function": {"name": block.get("name"), "arguments": block.get("input") or {}},
            }
            for block in of["tool_use"]
        ]
        whole: dict[str, Any] = {"role": message.get("role"), "content": _text(of["text"])}
        found.append({**whole, "tool_calls": calls} if calls else whole)
    return found


def _text(content: Any) -> str:
    try:
        return message_text(content)
    except ValueError as error:
        raise UnsupportedError("messages", str(error)) from None


def _tools(asked: MessagesAsked) -> Sequence[Mapping[str, Any]] | None:
    """The tools as functions with JSON schemas."""
    choice = (asked.tool_choice or {}).get("type", "auto")
    if choice not in ("auto", "none"):
        raise UnsupportedError(
            "tool_choice", "the model can't be made to call a tool: auto or none"
        )
    if choice == "none" or not asked.tools:
        return None
    for tool in asked.tools:
        if "input_schema" not in tool:
            raise UnsupportedError(
                "tools", f"only tools with an input_schema, not {tool.get('type')!r}"
            )
    return [
        {
            "type": "function",
            "function": {
                "name": tool.get("name"),
                "description": tool.get("description", ""),
                "parameters": tool["input_schema"],
            },
        }
        for tool in asked.tools
    ]


def _content(reply: Reply) -> list[dict[str, Any]]:
    message = reply.message
    calls = [
        {
            "type": "tool_use",
            "id": call["id"],
            "name": call["function"]["name"],
            "input": json.loads(call["function"]["arguments"]),
        }
        for call in message.get("tool_calls") or ()
    ]
    text = message["content"]
    return [*([{"type": "text", "text": text}] if text or not calls else []), *calls]


def _stop_reason(reply: Reply) -> str:
    if reply.message.get("tool_calls"):
        return "tool_use"
    if reply.stop is not None:
        return "stop_sequence"
    return "max_tokens" if reply.finish_reason == "length" else "end_turn"


def _event(kind: str, **fields: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"
