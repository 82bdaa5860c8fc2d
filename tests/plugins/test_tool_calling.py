"""Tools: schemas from type hints, checked arguments, errors told to the model, exact tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.agents import Episode, Limits, run_agent
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.errors import UsageError
from rlx.core.prompts import with_tools
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Rollout, Task
from rlx.plugins.agents._tools import load_tools
from rlx.plugins.agents.calculator import calculate
from rlx.plugins.agents.tool_calling import ToolCalling
from rlx.testing import check_agent

CHAT = tiny_tokenizer(CHATML)
PLAIN = tiny_tokenizer()
EOS = int(CHAT.eos_token_id)

TOOLS = '''
import asyncio, time
from typing import Annotated, Literal
from pydantic import Field
from rlx import Episode, Task


def search(
    query: str,
    limit: Annotated[int, Field(ge=1)] = 3,
    *,
    mode: Literal["web", "news"] = "web",
) -> list[str]:
    """Search the web.

    Slowly.

    Args:
        query: what to look for.
        limit: most results.
    """
    return [f"{mode}:{query}"] * limit


def fails(): raise KeyError("gone")
def exits(): raise SystemExit(1)
def sleeps(): time.sleep(5)
async def waits(): await asyncio.sleep(5)
def peeks(task: Task) -> str: return str(task.label)
def loose(*things): pass
def placed(a: int, /): return a
def callback(notes: "Notes"): return 1


class Notes:
    def __init__(self, task: Task):
        self.lines = [task.id]

    def add(self, line: str) -> int:
        """Write a line down."""
        self.lines.append(line)
        return len(self.lines)

    def show(self, episode: Episode) -> str:
        return "; ".join(self.lines) + f" ({episode.index})"

    def _hidden(self): ...


NUMBER = 3
'''


@pytest.fixture
def tools(tmp_path: Path) -> str:
    (tmp_path / "tools.py").write_text(TOOLS)
    return str(tmp_path / "tools.py")


class Script:
    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def __call__(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        text = self.texts[len(self.prompts)]
        self.prompts.append(list(prompt))
        tokens = [*PLAIN(text)["input_ids"], EOS][: sampling.max_new_tokens]
        self.sampled.append(tokens)
        return Generation(
            request_id=0,
            tokens=np.array(tokens, np.int32),
            logprobs=-np.ones(len(tokens), np.float32),
            finish_reason="stop",
            version=0,
        )


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def play(
    script: Sequence[str], *, chat: bool = True, index: int = 0, **params: Any
) -> tuple[Rollout, Script]:
    agent = Bound(
        ref=ComponentRef(kind="agents", name="tool_calling", target="x:y"),
        obj=ToolCalling,
        params=params,
    )
    prompt: Any = [{"role": "user", "content": "hi"}] if chat else "hi"
    tokenizer = with_tools(CHAT, agent.instance.chat_tools()) if chat else PLAIN
    tokens = (
        tokenizer.apply_chat_template(prompt, tokenize=True, add_generation_prompt=True)[
            "input_ids"
        ]
        if chat
        else PLAIN(prompt)["input_ids"]
    )
    engine = Script(script)
    episode = Episode(
        task=Task(id="data/0", prompt=prompt, tokens=tokens, label="secret"),
        group_id=0,
        index=index,
        seed=0,
        generate=engine,
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=500),
        limits=Limits(context_length=20_000),
    )
    return asyncio.run(run_agent(agent, episode)), engine


def raw(tokens: Sequence[int]) -> str:
    return str(CHAT.decode(tokens, skip_special_tokens=False))


def test_a_schema_comes_from_hints_and_docstring(tools: str) -> None:
    (tool,) = load_tools(f"{tools}:search")
    assert tool.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the web.\nSlowly.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for."},
                    "limit": {
                        "type": "integer",
                        "minimum": 1,
                        "default": 3,
                        "description": "most results.",
                    },
                    "mode": {"type": "string", "enum": ["web", "news"], "default": "web"},
                },
                "required": ["query"],
                "additionalProperties": False,
            },
        },
    }


def test_what_is_filled_in_is_not_shown(tools: str) -> None:
    (tool,) = load_tools(f"{tools}:peeks")
    assert tool.schema["function"]["parameters"]["properties"] == {}
    assert [tool.name for tool in load_tools(f"{tools}:Notes")] == ["add", "show"]


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("search", "names no function"),
        ("{tools}:serch", "search"),
        ("{tools}:NUMBER", "is int, not a function"),
        ("{tools}:loose", "any number of arguments"),
        ("{tools}:placed", "by position only"),
        ("{tools}:callback", "no JSON schema"),
    ],
)
def test_what_is_no_tool_is_refused_before_the_run(
    tools: str, reference: str, expected: str
) -> None:
    with pytest.raises(UsageError, match=expected):
        ToolCalling(tools=[reference.format(tools=tools)])
    with pytest.raises(UsageError, match="two tools are called 'peeks'"):
        ToolCalling(tools=[f"{tools}:peeks"] * 2)


def test_a_static_method_is_given_no_object(tmp_path: Path) -> None:
    (tmp_path / "static.py").write_text(
        "class Sums:\n"
        "    @staticmethod\n"
        "    def add(a: int, b: int) -> int:\n"
        '        """Add."""\n'
        "        return a + b\n"
    )
    rollout, _ = play([call("add", a=2, b=3), "5"], tools=[f"{tmp_path / 'static.py'}:Sums"])
    assert rollout.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}


def test_a_class_method_is_a_tool_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "bound.py").write_text(
        "class Sums:\n"
        "    start = 10\n\n"
        "    @classmethod\n"
        "    def add(cls, a: int, b: int) -> int:\n"
        '        """Add."""\n'
        "        return cls.start + a + b\n\n"
        "    def double(self, a: int) -> int:\n"
        '        """Double."""\n'
        "        return 2 * a\n"
    )
    said = [call("add", a=2, b=3), call("double", a=2), "5"]
    rollout, _ = play(said, tools=[f"{tmp_path / 'bound.py'}:Sums"])
    assert rollout.metrics == {"tool_calls": 2.0, "tool_errors": 0.0}
    assert "15" in raw(rollout.tokens)


def test_a_result_with_half_a_surrogate_pair_is_observed(tmp_path: Path) -> None:
    (tmp_path / "echo.py").write_text(
        "def echo(text: str) -> str:\n    'Say it.'\n    return text\n"
    )
    said = call("echo", text="so \ud83d")
    rollout, _ = play([said, "done"], tools=[f"{tmp_path / 'echo.py'}:echo"])
    assert "so \ufffd" in raw(rollout.tokens)


def test_results_are_observed_and_the_last_text_is_the_answer() -> None:
    rollout, engine = play(["Let me see. " + call("calculate", expression="6*7"), "It is 42."])
    assert rollout.text == "It is 42."
    assert rollout.metrics == {"tool_calls": 1.0, "tool_errors": 0.0}
    assert raw(engine.prompts[1]).endswith(
        "</tool_call><|im_end|>\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [message["role"] for message in rollout.messages] == [
        *("user", "assistant", "tool", "assistant")
    ]


@pytest.mark.parametrize("chat", [True, False])
def test_exactly_the_sampled_tokens_are_trained(chat: bool) -> None:
    script = [call("calculate", expression="1+1") * 2, call("nothing"), "done"]
    rollout, engine = play(script, chat=chat)
    trained = [rollout.tokens[span.start : span.stop].tolist() for span in rollout.spans]
    assert trained == engine.sampled
    assert [raw(tokens) for tokens in trained] == [text + "<|im_end|>" for text in script]
    for prompt, span in zip(engine.prompts, rollout.spans, strict=True):
        assert prompt == rollout.tokens[: span.start].tolist()
    between = raw(rollout.tokens[rollout.spans[0].stop : rollout.spans[1].start])
    assert between.count("2") == 2


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("fails", "Error: KeyError: 'gone'"),
        ("exits", "Error: SystemExit: 1"),
        ("sleeps", "Error: sleeps took longer than 0.2 s"),
        ("waits", "Error: waits took longer than 0.2 s"),
        ("serch", "Error: there is no tool 'serch'; did you mean 'search'?"),
    ],
)
def test_errors_are_told_to_the_model(tools: str, said: str, told: str) -> None:
    names = [f"{tools}:{name}" for name in ("fails", "exits", "sleeps", "waits", "search")]
    rollout, engine = play([call(said), "ok"], tools=names, timeout=0.2, error_penalty=0.25)
    assert told in raw(engine.prompts[1])
    assert rollout.metrics == {"tool_calls": 1.0, "tool_errors": 1.0}
    assert [span.reward for span in rollout.spans] == [-0.25, 0.0]
    assert rollout.error is None


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({}, "wrong arguments for search: query: Field required"),
        ({"query": "a", "limit": 0}, "limit: Input should be greater than or equal to 1"),
        ({"query": "a", "top": 3}, "top: Extra inputs are not permitted"),
        ({"query": "a", "mode": "x"}, "mode: Input should be 'web' or 'news'"),
    ],
)
def test_wrong_arguments_are_told_to_the_model(
    tools: str, arguments: dict[str, Any], told: str
) -> None:
    _, engine = play([call("search", **arguments), "ok"], tools=[f"{tools}:search"])
    assert told in raw(engine.prompts[1])


def test_calls_that_are_no_json_are_told_to_the_model() -> None:
    rollout, engine = play(["<tool_call>{oops}</tool_call>", "ok"])
    assert "Error: this call can't be read" in raw(engine.prompts[1])
    assert rollout.metrics["tool_errors"] == 1.0


def test_an_object_belongs_to_one_episode(tools: str) -> None:
    script = [call("add", line="x"), call("show"), call("peeks"), "ok"]
    for index in range(2):
        _, engine = play(script, tools=[f"{tools}:Notes", f"{tools}:peeks"], index=index)
        assert f"data/0; x ({index})" in raw(engine.prompts[2])
        assert "secret" in raw(engine.prompts[3])


def test_turns_are_bounded_and_the_last_call_gets_no_result() -> None:
    rollout, engine = play([call("calculate", expression="1")] * 5, max_turns=2)
    assert len(engine.prompts) == len(rollout.spans) == 2
    assert rollout.metrics["tool_calls"] == 1.0


def test_a_template_that_takes_tools_is_given_them() -> None:
    template = "{{ tools | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = with_tools(tiny_tokenizer(template), [{"a": 1}, {"b": 2}])
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "2x"


@pytest.mark.parametrize("system", [True, False])
def test_any_other_template_has_them_in_the_system_message(system: bool) -> None:
    tokenizer = with_tools(CHAT, ToolCalling().chat_tools())
    messages = [{"role": "system", "content": "Be brief."}] * system
    messages += [{"role": "user", "content": "x"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text.startswith("<|im_start|>system\n" + "Be brief.\n\n" * system + "# Tools")
    assert '"name": "calculate"' in text
    assert text.count("<|im_start|>system") == 1
    assert with_tools(PLAIN, [{"a": 1}]) is PLAIN


def test_the_calculator_only_calculates() -> None:
    assert calculate("(3 + 4) * 12 - -1") == "85"
    assert calculate("7 / 2") == "3.5"
    for text in ("__import__('os')", "2**9", "'a' * 3", "True + 1", "1" * 300):
        with pytest.raises(ValueError):  # noqa: PT011 - each has a message of its own
            calculate(text)


def test_it_holds_what_agents_must_hold() -> None:
    check_agent("tool_calling", examples=8)


@pytest.mark.parametrize("chat", [True, False])
def test_results_that_the_model_makes_up_are_not_sampled(chat: bool) -> None:
    made_up = call("calculate", expression="6*7") + "\n<tool_response>\n41\n</tool_response>\n41"
    rollout, engine = play([made_up, "42"], chat=chat)
    kept = rollout.tokens[rollout.spans[0].start : rollout.spans[0].stop]
    assert raw(kept) == call("calculate", expression="6*7") + "\n<tool_response>"
    shown = raw(engine.prompts[1])
    assert "41" not in shown
    assert "42" in shown.removeprefix(raw(engine.prompts[0]))
    assert shown.count("<tool_response>") == 1
    assert rollout.text == "42"
