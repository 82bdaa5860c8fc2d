"""The messages of an episode, and observations as tokens.

An observation in a chat is rendered by the tokenizer's chat template without touching what is
already there: the conversation is rendered with the model's last answer replaced by a marker, and
what follows the marker is appended.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from rlx.core.errors import ComponentError
from rlx.core.rollouts import Message, Task

Observation: TypeAlias = str | Message | Sequence[Message]

_MARKER = "qAvWkZ7rLxAnswer7ZkWvAq"


class Conversation:
    """What was said, by whom; observations wait here until the next engine call needs them."""

    def __init__(self, task: Task, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.chat = not isinstance(task.prompt, str)
        """The prompt went through the chat template."""
        prompt = task.prompt
        self.messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        )
        self._rendered: list[Message] = [*self.messages]
        """The messages that are in the tokens, the last answer included."""
        self._waiting: list[str | list[Message]] = []
        self._acted = False

    def act(self, text: str) -> None:
        """Note what the model wrote."""
        self.messages.append({"role": "assistant", "content": text})
        if (
            self._acted and self._rendered[-1]["role"] == "assistant"
        ):  # it wrote on after plain text
            text = self._rendered.pop()["content"] + text
        self._rendered.append({"role": "assistant", "content": text})
        self._acted = True

    def observe(self, observation: Observation) -> None:
        """Note what the environment says. Raises ComponentError where it can't be shown."""
        if isinstance(observation, str):
            if observation:
                self._waiting.append(observation)
                self.messages.append({"role": "user", "content": observation})
            return
        messages = [observation] if isinstance(observation, Mapping) else list(observation)
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ComponentError(
                    f"an observation is text or messages with role and content, not {message!r}"
                )
        if not self.chat:
            raise ComponentError(
                "the observation is a chat message, but the task's prompt is plain text: "
                "observe text, or use a model with a chat template"
            )
        if not self._acted:
            raise ComponentError(
                "chat messages can't be observed before the first generate: put them in the prompt"
            )
        if self._waiting and isinstance(self._waiting[-1], list):
            self._waiting[-1] += messages
        else:
            self._waiting.append(messages)
        self.messages += messages

    def take_observations(self, tokens: Sequence[int]) -> list[int]:
        """The waiting observations as token ids; `tokens` is the sequence that they go after."""
        taken: list[int] = []
        for item in self._waiting:
            if isinstance(item, str):
                taken += self._encode(item)
                if self._acted:
                    self._note_plain(item)
            else:
                last = taken[-1] if taken else tokens[-1]
                taken += self._encode(self._render(item, last))
                self._rendered += item
        self._waiting.clear()
        return taken

    def _note_plain(self, text: str) -> None:
        """Plain text after an answer belongs to that answer, as far as the template sees it."""
        answer = self._rendered[-1]
        self._rendered[-1] = {**answer, "content": answer["content"] + text}

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False)
        return [int(token) for token in encoded["input_ids"]]

    def _render(self, messages: list[Message], last_token: int) -> str:
        """What the template writes after the last answer, up to where the next one begins."""
        answer = {**self._rendered[-1], "content": _MARKER}
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    [*self._rendered[:-1], answer, *messages],
                    tokenize=False,
                    add_generation_prompt=True,
                )
            )
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ComponentError(
                f"the chat template refuses an observation (roles: {roles}): {error}"
            ) from error
        if text.count(_MARKER) != 1:
            raise ComponentError(
                f"the chat template shows the model's last answer {text.count(_MARKER)} times once "
                "an observation follows, so the observation can't be appended: observe plain text"
            )
        after = text.split(_MARKER)[1]
        # the answer's own end-of-turn token was sampled: not once more
        ended = str(self._tokenizer.decode([last_token], skip_special_tokens=False))
        if last_token in self._special_ids() and after.startswith(ended):
            return after[len(ended) :]
        return after

    def _special_ids(self) -> set[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {*self._tokenizer.all_special_ids, *added}


def shortened(observation: Observation, limit: int) -> Observation:
    """An observation with at most about `limit` characters; the same object where it has no more.

    Of a longer text the middle is left out, and the text says so. Messages share the limit.
    """
    if isinstance(observation, str):
        return _cut(observation, limit)
    single = isinstance(observation, Mapping)
    messages: list[Any] = [observation] if single else list(observation)
    texts = [_content(message) for message in messages]
    if sum(map(len, texts)) <= limit:
        return observation
    share = max(limit // len(messages), 1)
    cut = [
        {**message, "content": _cut(text, share)} if len(text) > share else message
        for message, text in zip(messages, texts, strict=True)
    ]
    return cut[0] if single else cut


def _content(message: Any) -> str:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, str) else "" if content is None else str(content)


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    head = 2 * limit // 3
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit:,} characters left out …]\n{text[-tail:]}"
