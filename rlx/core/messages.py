"""Chat messages as programs write them: one form to compare, one form for chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlx.core.rollouts import Message


def same_message(first: Message, second: Message) -> bool:
    """Whether two messages say the same.

    Programs send back what they were given in forms of their own: content as text or as parts,
    arguments of tools as text or as objects, white space around it trimmed, ids left out.
    """
    return _essence(first) == _essence(second)


def encodable(text: str) -> str:
    """The text with halves of surrogate pairs, which JSON can hold and tokenizers refuse, mended
    where both are there and shown as a replacement character where one is missing."""
    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def message_text(content: Any) -> str:
    """The text of a message's content: text, parts of text, or None.

    Raises ValueError for parts that are no text (images, audio).
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, Mapping):
        content = [content]
    try:
        parts = [*content]
    except TypeError:
        raise ValueError(f"content is text or parts of text, not {content!r}") from None
    return "".join(_part_text(part) for part in parts)


def for_template(message: Message) -> Message:
    """The message as chat templates expect it: content is text, arguments of tools are objects.

    Raises ValueError for content that is no text and for a message without role.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"a message is an object with role and content, not {message!r}")
    kept = {name: value for name, value in message.items() if value is not None}
    kept["content"] = message_text(message.get("content"))
    calls = message.get("tool_calls")
    if calls:
        kept["tool_calls"] = [_call_for_template(call) for call in calls]
    return kept


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ValueError(f"content of the type {kind!r} can't be shown to a model of text")


def _call_for_template(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f"a tool call is {{id, type, function: {{name, arguments}}}}, not {call!r}"
        )
    return {**call, "function": {**function, "arguments": _arguments(function)}}


def _arguments(function: Mapping[str, Any]) -> Any:
    """As an object where they are one; else as they are."""
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _essence(message: Message) -> Any:
    try:
        text = message_text(message.get("content")).strip()
    except ValueError:
        text = repr(message.get("content"))
    calls = [
        (call["function"].get("name"), _arguments(call["function"]))
        for call in message.get("tool_calls") or ()
        if isinstance(call, Mapping) and isinstance(call.get("function"), Mapping)
    ]
    return message.get("role"), text, calls
