"""Conversations through chat templates of every style: appended where the template appends, begun
anew where it rewrites, never anything between."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.agents import Episode, Limits
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.errors import ComponentError
from rlx.core.rollouts import Message, Rollout, Task
from rlx.core.stops import cut_at_stop

E, S = "<|im_end|>", "<|im_start|>"
APPENDING = {
    "chatml": CHATML,
    "a system message of its own": (
        "{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
        + CHATML
    ),
    "headers": (
        "{% for m in messages %}<|im_start|>{{ m.role }}<|head|>\n\n{{ m.content | trim }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant<|head|>\n\n"
        "{% endif %}"
    ),
    "instructions in brackets": (
        "{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content }}<|im_end|>"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "the model's own word for its role": (
        "{% for m in messages %}<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}"
    ),
    "tags and line ends": (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "thoughts kept until the next question": (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.index0 > ns.last else m.content.split('</think>')[-1] }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
}
"""The styles of Llama, Mistral, Gemma, Zephyr, Qwen and SmolLM, among others."""
REWRITING = {
    "earlier thoughts left out": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
    ),
    "only the last three messages": (
        "{% for m in messages[-3:] %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "a count of the messages": "{{ messages | length }}\n" + CHATML,
}
ANSWERS = ["think</think> one", "two ", "three</think>four"]


class Engine:
    def __init__(self, tokenizer: Any, script: Sequence[str]) -> None:
        self.tokenizer, self.script = tokenizer, script
        self.prompts: list[list[int]] = []
        self.sampled: list[list[int]] = []

    async def __call__(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        await asyncio.sleep(0)
        text = self.script[len(self.prompts) % len(self.script)]
        self.prompts.append(prompt)
        tokens = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        self.sampled.append(tokens)
        return Generation(
            request_id=0,
            tokens=np.array(tokens, np.int32),
            logprobs=-np.ones(len(tokens), np.float32),
            finish_reason="stop",
            version=0,
        )


def make_episode(
    template: str, *, history: Any = "split", script: Sequence[str] = ANSWERS
) -> tuple[Episode, Engine]:
    tokenizer = tiny_tokenizer(template)
    engine = Engine(tokenizer, script)
    prompt = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    episode = Episode(
        task=Task(id="t/0", prompt=prompt, tokens=tokenizer(text)["input_ids"]),
        group_id=0,
        index=0,
        seed=0,
        generate=engine,
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=100),
        limits=Limits(context_length=5000, history=history),
    )
    return episode, engine


async def observing(episode: Episode, role: str) -> None:
    """The way of agents: messages are observed."""
    for turn in range(3):
        await episode.generate()
        episode.observe([{"role": role, "content": f"observation {turn}"}])


async def answering(episode: Episode, role: str) -> None:
    """The way of chat clients: the whole conversation is sent again."""
    messages: list[Message] = [{"role": "user", "content": "hi"}]
    for turn in range(3):
        reply = await episode.answer([*messages])
        # clients trim what they send back
        messages.append({"role": "assistant", "content": reply.text.strip()})
        messages.append({"role": role, "content": f"observation {turn}"})


def play(
    template: str, way: Any, role: str = "user", history: str = "split"
) -> tuple[Rollout, Engine]:
    episode, engine = make_episode(template, history=history)
    asyncio.run(way(episode, role))
    return episode.rollout(), engine


def squeezed(text: str) -> str:
    return "".join(text.split())


def raw(engine: Engine, tokens: Any) -> str:
    return str(engine.tokenizer.decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize("way", [observing, answering])
@pytest.mark.parametrize("style", APPENDING)
def test_the_ids_of_a_turn_are_a_prefix_of_those_of_the_next(style: str, way: Any) -> None:
    role = "tool" if "thoughts" in style else "user"
    rollout, engine = play(APPENDING[style], way, role)
    assert list(rollout.segments) == [0]
    before: list[int] = []
    for prompt, sampled in zip(engine.prompts, engine.sampled, strict=True):
        assert prompt[: len(before)] == before
        before = [*prompt, *sampled]
    assert rollout.tokens.tolist() == before


@pytest.mark.parametrize("style", APPENDING)
def test_appending_writes_what_the_template_writes(style: str) -> None:
    """But for white space, which templates trim and sampled tokens keep."""
    role = "tool" if "thoughts" in style else "user"
    rollout, engine = play(APPENDING[style], observing, role)
    messages = [{"role": "user", "content": "hi"}]
    for turn, answer in enumerate(ANSWERS[:2]):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": role, "content": f"observation {turn}"})
    whole = engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert squeezed(raw(engine, engine.prompts[-1])) == squeezed(whole)
    assert len(rollout.spans) == 3


@pytest.mark.parametrize("way", [observing, answering])
@pytest.mark.parametrize("style", REWRITING)
def test_rewritten_history_is_a_new_segment_with_what_the_template_writes(
    style: str, way: Any
) -> None:
    rollout, engine = play(REWRITING[style], way)
    assert len(rollout.segments) > 1
    bounds = [*rollout.segments, len(rollout.tokens)]
    spans = [rollout.tokens[span.start : span.stop].tolist() for span in rollout.spans]
    assert spans == engine.sampled
    for span, prompt in zip(rollout.spans, engine.prompts, strict=True):
        start = max(begin for begin in bounds if begin <= span.start)
        assert rollout.tokens[start : span.start].tolist() == prompt
    messages = [{"role": "user", "content": "hi"}]
    for turn, answer in enumerate(ANSWERS[:2]):
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": f"observation {turn}"})
    whole = engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert squeezed(raw(engine, engine.prompts[-1])) == squeezed(whole)


@pytest.mark.parametrize("style", REWRITING)
def test_a_run_may_stop_where_history_is_rewritten(style: str) -> None:
    with pytest.raises(ComponentError, match=r"(?s)rewrites what.*before it was.*history=split"):
        play(REWRITING[style], observing, history="error")


def test_history_may_be_kept_where_the_template_shows_the_last_answer() -> None:
    rollout, _ = play(REWRITING["earlier thoughts left out"], observing, history="append")
    assert list(rollout.segments) == [0]


def answered(messages: list[Any], *more: list[Any], tools: Any = None) -> Rollout:
    episode, _ = make_episode(CHATML, script=["one", "two", "three"])

    async def ask() -> None:
        for asked in (messages, *more):
            await episode.answer(asked, tools=tools)

    asyncio.run(ask())
    return episode.rollout()


HI = {"role": "user", "content": "hi"}
ONE = {"role": "assistant", "content": "one"}


@pytest.mark.parametrize(
    ("second", "segments"),
    [
        ([HI, ONE, {"role": "user", "content": "more"}], 1),
        ([HI, {**ONE, "content": [{"type": "text", "text": "one"}]}, HI], 1),
        ([HI, {**ONE, "content": " one\n", "refusal": None}, HI], 1),
        ([HI, {**ONE, "content": "1"}, HI], 2),  # the program changed the answer
        ([{**HI, "content": "Hi"}, ONE, HI], 2),
        ([HI], 2),  # the same question again
        ([HI, ONE], 2),  # nothing to answer to
        ([{"role": "system", "content": "s"}, HI, ONE, HI], 2),
    ],
)
def test_what_extends_an_answer_and_what_does_not(second: list[Any], segments: int) -> None:
    rollout = answered([HI], second)
    assert len(rollout.segments) == segments
    assert len(rollout.spans) == 2


def test_two_conversations_in_turn_extend_each_its_own_segment() -> None:
    other = {"role": "user", "content": "other"}
    two = {"role": "assistant", "content": "two"}
    rollout = answered([HI], [other], [HI, ONE, HI], [other, two, HI])
    assert len(rollout.segments) == 2
    assert [len(span) for span in rollout.spans] == [4, 6, 4, 4]
    assert rollout.text.startswith("one\nuser\nhi\nassistant\nthree\ntwo\nuser")


def test_rewards_go_to_the_latest_turn_wherever_it_lies() -> None:
    episode, _ = make_episode(CHATML, script=["one", "two", "three"])

    async def ask() -> None:
        await episode.answer([HI])
        await episode.answer([{**HI, "content": "other"}])
        await episode.answer([HI, ONE, HI])
        episode.reward(1.0)

    asyncio.run(ask())
    assert [span.reward for span in episode.rollout().spans] == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("one END two END", ["END"], "one END"),
        ("abcd", ["x"], "abcd<|im_end|>"),
        ("abcd", ["d", "bc"], "abc"),
        ("a<|im_end|>", ["a"], "a"),
    ],
)
def test_a_stop_string_cuts_with_its_last_token(text: str, stop: list[str], kept: str) -> None:
    tokenizer = tiny_tokenizer(CHATML)
    tokens = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    whole = Generation(
        request_id=0,
        tokens=np.array(tokens, np.int32),
        logprobs=-np.arange(len(tokens), dtype=np.float32),
        finish_reason="length",
        version=1,
        versions=((1, 2), (2, len(tokens) - 2)),
    )
    found = cut_at_stop(whole, stop, tokenizer)
    assert tokenizer.decode(found.tokens) == kept
    assert len(found.tokens) == len(found.logprobs) == sum(n for _, n in found.versions)
    assert found.finish_reason == ("stop" if found is not whole else "length")


def test_a_stop_string_that_is_a_token_is_the_engines_business() -> None:
    tokenizer = tiny_tokenizer(CHATML)
    asked: list[Sampling] = []

    async def engine(prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        asked.append(sampling)
        return Generation(
            request_id=0,
            tokens=np.array(tokenizer("ab<|im_start|>")["input_ids"], np.int32),
            logprobs=np.zeros(3, np.float32),
            finish_reason="stop",
            version=0,
        )

    episode, _ = make_episode(CHATML)
    episode._generate = engine
    reply = asyncio.run(episode.generate(stop="<|im_start|>"))
    (sampling,) = asked
    assert sampling.stop_token_ids == (tokenizer.convert_tokens_to_ids("<|im_start|>"),)
    assert sampling.max_new_tokens == 100
    assert reply.text == "ab"


def test_a_stop_string_is_not_shown_and_what_follows_it_never_was() -> None:
    episode, engine = make_episode(CHATML, script=["say STOP more"])
    reply = asyncio.run(episode.generate(stop=["STOP"]))
    assert (reply.text, reply.stop, reply.finish_reason) == ("say ", "STOP", "stop")
    rollout = episode.rollout()
    assert raw(engine, rollout.tokens[rollout.spans[0].start :]) == "say STOP"
    assert len(rollout.logprobs) == 8
