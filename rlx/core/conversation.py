"""The messages of one conversation, and what is added to it as tokens.

An observation in a chat is rendered by the tokenizer's chat template without touching what is
already there: the conversation is rendered with the model's last answer replaced by a marker, and
what follows the marker is appended. The same conversation rendered whole says whether the template
leaves alone what it wrote before; where it does not (templates that drop earlier thoughts), the
`history` setting decides what the next prompt is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from rlx.core.errors import ComponentError
from rlx.core.messages import encodable, same_message
from rlx.core.rollouts import Message

Observation: TypeAlias = str | Message | Sequence[Message]
History: TypeAlias = Literal["split", "append", "error"]
"""Where the template rewrites history: a new segment begins with what it writes; the observation
is appended all the same; or the run ends and says why."""

_MARKER = "qAvWkZ7rLxAnswer7ZkWvAq"


@dataclass(frozen=True, slots=True, kw_only=True)
class Continuation:
    """What the next engine call is given beyond the sequence so far."""

    tokens: list[int]
    fresh: bool = False
    """`tokens` are a whole prompt: the template rewrote what was there."""


class Conversation:
    """What was said, by whom; observations wait here until the next engine call needs them.

    Args:
        prompt: text, or chat messages.
        tools: JSON schemas that the template shows the model.
        history: what is done where the template rewrites what it wrote before.
    """

    def __init__(
        self,
        prompt: str | Sequence[Message],
        tokenizer: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        history: History = "split",
    ) -> None:
        self._tokenizer = tokenizer
        self._history = history
        self.tools = [*tools] if tools else None
        self.chat = not isinstance(prompt, str)
        """The prompt went through the chat template."""
        self.text = prompt if isinstance(prompt, str) else ""
        """Prompt, answers and observations of a conversation in plain text."""
        self.messages: list[Message] = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        )
        self._rendered: list[Message] = [*self.messages]
        """The messages that are in the tokens, the last answer included."""
        self._written: str | None = None
        """What the template wrote up to the last answer; None: not asked for yet."""
        self._waiting: list[str | list[Message]] = []
        self._acted = False

    def act(self, text: str, message: Message | None = None) -> None:
        """Note what the model wrote; `message` is what the agent was shown of it."""
        self.messages.append(message or {"role": "assistant", "content": text})
        self.text += text
        # Calls of tools stay as the model wrote them; what was cut off the text does not.
        if message is not None and not message.get("tool_calls"):
            text = str(message.get("content") or "")
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
                self.text += observation
                self.messages.append({"role": "user", "content": observation})
            return
        messages = [observation] if isinstance(observation, Mapping) else list(observation)
        for message in messages:
            if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
                raise ComponentError(
                    f"an observation is text or messages with role and content, not {message!r}"
                )
        if not messages:
            return
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

    def note(self, text: str) -> None:
        """Note what the environment said where its tokens are there already."""
        self.text += text
        self.messages.append({"role": "user", "content": text})

    def rest_of(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[Message] | None:
        """What `messages` add to this conversation; None when they do not go on from it."""
        known = len(self.messages)
        if not self.chat or (tools or None) != self.tools or len(messages) < known:
            return None
        if not all(map(same_message, self.messages, messages)):
            return None
        return [*messages[known:]]

    def rest_of_text(self, text: str) -> str | None:
        """What `text` adds to this conversation; None when it does not go on from it."""
        return None if self.chat or not text.startswith(self.text) else text[len(self.text) :]

    def take_observations(self, tokens: Sequence[int]) -> Continuation:
        """The waiting observations as token ids; `tokens` is the sequence that they go after."""
        taken: list[int] = []
        fresh = False
        for item in self._waiting:
            if isinstance(item, str):
                taken += self._encode(item)
                if self._acted:
                    self._note_plain(item)
                continue
            after, rewritten = self._render(item)
            if rewritten is not None:
                taken, fresh = self._encode(rewritten), True
            else:
                last = taken[-1] if taken else tokens[-1]
                taken += self._encode(self._without_end(after, last))
            self._rendered += item
        self._waiting.clear()
        return Continuation(tokens=taken, fresh=fresh)

    def prompt_tokens(self) -> list[int]:
        """The conversation as the prompt of an engine call, rendered whole."""
        self._written = self._template(self.messages)
        return self._encode(self._written)

    def _note_plain(self, text: str) -> None:
        """Plain text after an answer belongs to that answer, as far as the template sees it."""
        answer = self._rendered[-1]
        self._rendered[-1] = {**answer, "content": answer["content"] + text}

    def _encode(self, text: str) -> list[int]:
        encoded = self._tokenizer(
            encodable(text), add_special_tokens=False, return_attention_mask=False
        )
        return [int(token) for token in encoded["input_ids"]]

    def _render(self, messages: list[Message]) -> tuple[str, str | None]:
        """What the template writes after the last answer, up to where the next one begins; and the
        whole conversation as it writes it, where that does not go on from what it wrote before."""
        *before, answer = self._rendered
        marked = self._template([*before, {**answer, "content": _MARKER}, *messages])
        times, after = marked.count(_MARKER), marked.partition(_MARKER)[2]
        if self._history == "append":
            if times == 1:
                return after, None
            raise ComponentError(
                f"the chat template shows the model's last answer {times} times once an "
                "observation follows, so the observation can't be appended: observe plain text, "
                "or set episode.history=split"
            )
        whole = self._template([*before, answer, *messages])
        if self._written is None:
            self._written = self._template(before)
        goes_on = f"{self._written}{answer['content']}{after}"
        if times == 1 and _same_text(whole, goes_on):
            self._written = goes_on
            return after, None
        if self._history == "error":
            raise ComponentError(_explanation(goes_on, whole))
        self._written = whole
        return after, whole

    def _template(self, messages: Sequence[Message]) -> str:
        options = {"tools": self.tools} if self.tools else {}
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    [*messages], tokenize=False, add_generation_prompt=True, **options
                )
            )
        except Exception as error:
            roles = ", ".join(str(message["role"]) for message in messages)
            raise ComponentError(
                f"the chat template refuses the conversation (roles: {roles}): {error}"
            ) from error

    def _without_end(self, after: str, last_token: int) -> str:
        """The answer's own end-of-turn token was sampled: not once more."""
        ended = str(self._tokenizer.decode([last_token], skip_special_tokens=False))
        if after.startswith(ended) and last_token in self._special_ids:
            return after[len(ended) :]
        return after

    @functools.cached_property
    def _special_ids(self) -> set[int]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {*self._tokenizer.all_special_ids, *added}


def _same_text(first: str, second: str) -> bool:
    """Whether two texts are the same but for white space, which many templates trim."""
    return first == second or "".join(first.split()) == "".join(second.split())


def _explanation(expected: str, found: str) -> str:
    """Where the template begins to write something else than before."""
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    start = max(at - 40, 0)
    return (
        "the chat template rewrites what the model has already seen: before it was "
        f"…{expected[start : at + 40]!r}, now it is …{found[start : at + 40]!r}. The setting "
        "episode.history=split begins a new segment of the rollout there; append keeps what was "
        "there, though the model is never given such a prompt outside of training"
    )


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
