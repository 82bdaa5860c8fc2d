"""Agents as people write them with the `openai` and `anthropic` packages; rlx is not imported."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import anthropic
import openai

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        },
    },
}


def one_question(task: dict[str, Any], base_url: str, api_key: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    client.chat.completions.create(model="policy", messages=task["prompt"])


def any_prompt(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Chat or text, whichever the task is; a second turn where the first one has an odd length."""
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    if isinstance(task["prompt"], str):
        text = client.completions.create(model="policy", prompt=task["prompt"]).choices[0].text
        if len(text) % 2:
            client.completions.create(model="policy", prompt=f"{task['prompt']}{text} again")
    else:
        one_question(task, base_url, api_key)


def two_questions(task: dict[str, Any], base_url: str, api_key: str) -> float:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = [*task["prompt"]]
    first = client.chat.completions.create(model="policy", messages=messages)
    messages.append(first.choices[0].message.model_dump(exclude_none=True))
    messages.append({"role": "user", "content": "Sure?"})
    second = client.chat.completions.create(model="policy", messages=messages, logprobs=True)
    assert second.choices[0].logprobs is not None
    assert second.usage is not None
    assert second.usage.completion_tokens == len(second.choices[0].logprobs.content or [])
    return float(second.choices[0].message.content == task["label"])


async def with_a_tool(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["prompt"]]
    for _ in range(3):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[ADD], tool_choice="auto"
        )
        (choice,) = answer.choices
        messages.append(choice.message)
        if choice.finish_reason != "tool_calls":
            break
        for call in choice.message.tool_calls or []:
            numbers = json.loads(call.function.arguments)
            result = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return {"reward": 1, "response": choice.message.content, "metrics": {"asked": len(messages)}}


def streaming(task: dict[str, Any], base_url: str, api_key: str) -> str:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    text, finish, usage = "", None, None
    stream = client.chat.completions.create(
        model="policy",
        messages=task["prompt"],
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        if chunk.usage:
            usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
    assert finish == "stop"
    assert usage is not None
    parts = client.completions.create(model="policy", prompt="again", stream=True)
    return text + "".join(part.choices[0].text for part in parts)


def text_only(task: dict[str, Any], base_url: str, api_key: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    prompt = str(task["prompt"])
    for _ in range(2):
        answer = client.completions.create(
            model="policy", prompt=prompt, max_tokens=3, logprobs=1, stop=["#"]
        )
        choice = answer.choices[0]
        assert choice.logprobs is not None
        assert len(choice.logprobs.tokens or []) == len(choice.logprobs.token_logprobs or [])
        prompt += choice.text + "[next]"


def side_by_side(task: dict[str, Any], base_url: str, api_key: str) -> None:
    async def ask_all() -> None:
        client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        await asyncio.gather(
            *(
                client.chat.completions.create(model="policy", messages=task["prompt"])
                for _ in range(3)
            )
        )

    asyncio.run(ask_all())


def with_anthropic(task: dict[str, Any], base_url: str, api_key: str) -> str:
    client = anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key)
    tools: list[Any] = [
        {"name": "add", "description": "Add.", "input_schema": ADD["function"]["parameters"]}  # type: ignore[index]
    ]
    messages: list[Any] = [*task["prompt"]]
    first = client.messages.create(
        model="policy", max_tokens=100, system="Be brief.", messages=messages, tools=tools
    )
    assert first.stop_reason == "tool_use"
    (use,) = (block for block in first.content if block.type == "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "5"}
    messages += [
        {"role": "assistant", "content": [block.model_dump() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    with client.messages.stream(
        model="policy", max_tokens=100, system="Be brief.", messages=messages, tools=tools
    ) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().stop_reason == "end_turn"
    return text


async def blocks_and_exits(task: dict[str, Any], base_url: str, api_key: str) -> None:
    time.sleep(3)
    raise SystemExit(3)


async def ticks(task: dict[str, Any], base_url: str, api_key: str) -> None:
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
    await client.chat.completions.create(model="policy", messages=task["prompt"])


def fails(task: dict[str, Any]) -> None:
    raise RuntimeError("no such file")


def asks_for_ever(task: dict[str, Any], base_url: str, api_key: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    while True:
        client.chat.completions.create(model="policy", messages=task["prompt"])


def goes_on_for_ever(task: dict[str, Any], base_url: str, api_key: str) -> None:
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages: list[Any] = [*task["prompt"]]
    while True:
        answer = client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message, {"role": "user", "content": "more"}]


def returns_a_list(task: dict[str, Any], base_url: str, api_key: str) -> list[int]:
    one_question(task, base_url, api_key)
    return [1]


def wrong_parameter(question: str) -> None: ...


if __name__ == "__main__":
    import os
    import sys

    given = json.load(sys.stdin)
    two_questions(given, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print("thinking aloud")
    print(json.dumps({"reward": 0.5}))


async def loops_for_ever(task: dict[str, Any], base_url: str, api_key: str) -> None:
    await ticks(task, base_url, api_key)
    if task["id"] == "bad":
        while True:
            pass
    await asyncio.sleep(1.5)


async def blocks_in_c(task: dict[str, Any], base_url: str, api_key: str) -> None:
    await ticks(task, base_url, api_key)
    if task["id"] == "bad":
        time.sleep(12)


async def never_asks(task: dict[str, Any]) -> float:
    return 1.0


async def says_nothing(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    await ticks(task, base_url, api_key)
    return {}
