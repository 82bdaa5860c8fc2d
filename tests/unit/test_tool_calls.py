"""Tool calls are read from what models write, and nothing that they write raises."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.errors import UsageError
from rlx.core.tool_calls import FORMATS, ToolCall, ToolCalls, parse_tool_calls

ADD = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
CALL = ToolCall(name="add", arguments={"a": 1, "b": 2})


def test_hermes_calls_are_taken_out_of_the_text() -> None:
    found = parse_tool_calls(
        f"One.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{ADD}</tool_call>"
    )
    assert found == ToolCalls(content="One.", calls=(CALL, CALL))


def test_a_cut_off_hermes_call_without_its_end_mark_is_read_where_it_can_be() -> None:
    assert parse_tool_calls(f"<tool_call>{ADD}").calls == (CALL,)
    cut = parse_tool_calls(f"<tool_call>{ADD[:-4]}")
    assert not cut.calls
    assert "not valid JSON" in cut.errors[0]


@pytest.mark.parametrize(
    "text",
    [
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}',
        f"[TOOL_CALLS][{ADD}]",
        json.dumps({"name": "add", "arguments": json.dumps({"a": 1, "b": 2})}),
    ],
)
def test_json_messages_of_llama_and_mistral_are_calls(text: str) -> None:
    assert parse_tool_calls(text) == ToolCalls(content="", calls=(CALL,))


def test_several_json_calls_divided_by_semicolons() -> None:
    assert parse_tool_calls(f"{ADD}; {ADD}").calls == (CALL, CALL)


@pytest.mark.parametrize("text", ["The answer is 4.", '{"answer": 4}', "{not json", "[1, 2]", ""])
def test_an_answer_that_is_no_call_stays_as_it_is(text: str) -> None:
    assert parse_tool_calls(text) == ToolCalls(content=text)


@pytest.mark.parametrize(
    "inside",
    [
        "[]",
        '{"arguments": {}}',
        '{"name": "add", "arguments": 3}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
    ],
)
def test_a_marked_call_of_the_wrong_shape_is_an_error_for_the_model(inside: str) -> None:
    found = parse_tool_calls(f"<tool_call>{inside}</tool_call>")
    assert not found.calls
    assert len(found.errors) == 1


def test_a_function_is_a_parser_too() -> None:
    assert parse_tool_calls("x", lambda text: ToolCalls(content=text * 2)).content == "xx"


def test_a_function_may_be_given_by_reference(tmp_path: Path) -> None:
    file = tmp_path / "calls.py"
    file.write_text(
        "from rlx.core.tool_calls import ToolCall, ToolCalls\n"
        "def parse(text):\n"
        "    return ToolCalls(content='', calls=[ToolCall(name=text, arguments={})])\n"
    )
    assert parse_tool_calls("add", f"{file}:parse").calls[0].name == "add"


def test_an_unknown_format_is_named() -> None:
    with pytest.raises(UsageError, match="hermes"):
        parse_tool_calls("x", "hermse")


@given(st.text() | st.text(alphabet='<tool_call>{}[]",:;/name'), st.sampled_from(sorted(FORMATS)))
def test_no_text_raises(text: str, parser: str) -> None:
    parse_tool_calls(text, parser)
