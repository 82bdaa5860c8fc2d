"""Stand-ins for what is heavy: a tokenizer of one token per character, an engine that follows a
script, groups made of rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.rollouts import Group, Rollout, Span, Task

_END = 0
_TURN_ENDS = "\x00"


class CharTokenizer:
    """One token per character; token 0 ends a turn. Chats are lines `role: content`."""

    all_special_ids = (_END,)
    eos_token_id = _END

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(character) for character in text]}

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = False, **_: Any) -> str:
        shown = [token for token in tokens if not (skip_special_tokens and token == _END)]
        return "".join(chr(token) for token in shown)

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        lines = [f"{message['role']}: {message['content']}{_TURN_ENDS}\n" for message in messages]
        opening = "assistant: " if options.get("add_generation_prompt") else ""
        return "".join(lines) + opening


@dataclass
class ScriptedEngine:
    """Answers from a script, over and over; `None` in it is a reply that is cut off."""

    script: Sequence[str | None]
    calls: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)

    async def __call__(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        number = len(self.calls)
        self.calls.append(list(prompt))
        await asyncio.sleep(0)
        text = self.script[number % len(self.script)]
        tokens = [ord("~")] if text is None else [*(ord(character) for character in text), _END]
        cut = tokens[: sampling.max_new_tokens]
        self.sampled.append(cut)
        return Generation(
            request_id=number,
            tokens=np.array(cut, dtype=np.int32),
            logprobs=np.full(len(cut), -0.5, dtype=np.float32),
            finish_reason="length" if text is None or len(cut) < len(tokens) else "stop",
            version=0,
        )


def task(
    number: int = 0,
    *,
    prompt: str | list[dict[str, str]] = "How much is 2 + 2?",
    label: Any = "4",
    source: str = "test",
) -> Task:
    """Return a task whose tokens are those of `CharTokenizer`."""
    tokenizer = CharTokenizer()
    text = prompt
    if not isinstance(text, str):
        text = tokenizer.apply_chat_template(text, add_generation_prompt=True)
    return Task(
        id=f"{source}/{number}",
        prompt=prompt,
        tokens=tokenizer(text)["input_ids"],
        label=label,
        source=source,
        columns={"prompt": prompt, "label": label},
    )


def group(number: int, of: Task, rewards: Sequence[float], part: str = "test") -> Group:
    """Return a group of one-token rollouts with the given rewards."""
    rollouts = [
        Rollout(
            task=of,
            group_id=number,
            index=index,
            tokens=np.array([*of.tokens, ord("4")], dtype=np.int32),
            spans=(
                Span(
                    start=len(of.tokens),
                    stop=len(of.tokens) + 1,
                    version=0,
                    finish_reason="stop",
                ),
            ),
            logprobs=np.array([-0.5], dtype=np.float32),
            text="4",
            finish_reason="stop",
            reward=reward,
            parts={part: reward},
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id=number, task=of, rollouts=rollouts)
