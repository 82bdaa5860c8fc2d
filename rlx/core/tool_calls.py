"""Tool calls in what a model wrote: found, read, and taken out of the text.

Two formats are built in. `hermes` (Qwen, Hermes, SmolLM): any number of
`<tool_call>{"name": …, "arguments": {…}}</tool_call>`. `json` (Llama 3, Mistral): the whole message
is one such object, several divided by `;`, or a list of them, with `arguments` or `parameters`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from rlx.core.errors import UsageError, did_you_mean
from rlx.core.importing import import_target


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call that the model asked for."""

    name: str
    arguments: Mapping[str, Any]
    """As the model gave them; nothing is checked against the tool's schema."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCalls:
    """What a message says beside the calls in it."""

    content: str
    """The text without its calls, stripped where there were any."""
    calls: Sequence[ToolCall] = ()
    """In the order of the text."""
    errors: Sequence[str] = field(default_factory=tuple)
    """What was marked as a call and can't be read, one message each, for the model to see."""


ToolCallParser: TypeAlias = Callable[[str], ToolCalls]
"""`parser(text of a message) -> ToolCalls`; it raises nothing, whatever the text."""

_MARKED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_PREFIX = re.compile(r"^\s*(?:<\|python_tag\|>|\[TOOL_CALLS\])\s*")


def parse_tool_calls(text: str, parser: str | ToolCallParser = "auto") -> ToolCalls:
    """Read the tool calls of a message.

    Args:
        parser: a format of `FORMATS`, `auto` for whichever the text has, or a function; also one
            by reference, `file.py:function` or `pkg.mod:function`.

    Raises UsageError for a format that there is not, and for a function that can't be imported.

    >>> parse_tool_calls('Yes. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ToolCalls(content='Yes.', calls=(ToolCall(name='add', arguments={'a': 1}),), errors=())
    """
    return parser_of(parser)(text)


def parser_of(parser: str | ToolCallParser) -> ToolCallParser:
    """The parser of that name, or at that reference. Raises UsageError where there is none."""
    if not isinstance(parser, str):
        return parser
    if ":" in parser:
        found: ToolCallParser = import_target(parser, label=f"the format of tool calls {parser!r}")
        return found
    if parser not in FORMATS:
        raise UsageError(
            f"there is no format of tool calls {parser!r}",
            fix=did_you_mean(parser, FORMATS)
            or f"one of: {', '.join(FORMATS)}, or a function as file.py:name",
        )
    return FORMATS[parser]


def hermes(text: str) -> ToolCalls:
    """Calls between `<tool_call>` and `</tool_call>`; the last one may lack its end."""
    calls: list[ToolCall] = []
    errors: list[str] = []
    for match in _MARKED.finditer(text):
        _read(match[1], calls, errors)
    if not calls and not errors:
        return ToolCalls(content=text)
    rest = _MARKED.sub("", text).strip()
    return ToolCalls(content=rest, calls=tuple(calls), errors=tuple(errors))


def json_message(text: str) -> ToolCalls:
    """A message that is a call, or several, and nothing else."""
    stripped = _PREFIX.sub("", text).strip()
    marked = stripped != text.strip()
    if not marked and not stripped.startswith(("{", "[")):
        return ToolCalls(content=text)
    calls: list[ToolCall] = []
    errors: list[str] = []
    for value in _values(stripped, errors):
        _take(value, calls, errors)
    # Unmarked JSON may be an answer in JSON: it is a call when all of it reads as calls.
    if not marked and (errors or not calls):
        return ToolCalls(content=text)
    return ToolCalls(content="", calls=tuple(calls), errors=tuple(errors))


def any_format(text: str) -> ToolCalls:
    """`hermes` where the text has its mark, else `json`."""
    return hermes(text) if "<tool_call>" in text else json_message(text)


FORMATS: Final[Mapping[str, ToolCallParser]] = {
    "auto": any_format,
    "hermes": hermes,
    "json": json_message,
}


def _values(text: str, errors: list[str]) -> list[Any]:
    """The JSON values of a message, divided by `;` or white space; lists are flattened."""
    decoder, values, at = json.JSONDecoder(), [], 0
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            errors.append(f"not valid JSON: {error}")
            break
        values += value if isinstance(value, list) else [value]
        while at < len(text) and (text[at].isspace() or text[at] == ";"):
            at += 1
    return values


def _read(text: str, calls: list[ToolCall], errors: list[str]) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        errors.append(f"a tool call is not valid JSON: {error}")
        return
    _take(value, calls, errors)


def _take(value: Any, calls: list[ToolCall], errors: list[str]) -> None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        errors.append('a tool call is an object {"name": …, "arguments": {…}}')
        return
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as JSON in a string
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            errors.append(f"the arguments of {value['name']!r} are not valid JSON: {error}")
            return
    if not isinstance(arguments, dict):
        errors.append(f"the arguments of {value['name']!r} are not an object")
        return
    try:  # Python reads NaN and Infinity, which JSON does not have and nobody can be sent
        json.dumps(arguments, allow_nan=False)
    except (ValueError, RecursionError) as error:
        errors.append(f"the arguments of {value['name']!r} are not valid JSON: {error}")
        return
    calls.append(ToolCall(name=value["name"], arguments=arguments))
