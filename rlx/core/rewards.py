"""What a reward is given and what it returns. Imports NumPy and nothing heavier.

    def f(sample: RewardInputs, *, …) -> float | bool | int | Reward | None

`scope="group"` and `scope="batch"` functions take a list of samples and return a list as long.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.core.rollouts import FinishReason, Message, Rollout

MEAN_KEY = "rlx_reward_mean"
STD_KEY = "rlx_reward_std"
"""Keys of a reward model's `config.json`: mean and standard deviation of its scores on the data
that it was trained on. A scorer gives (score − mean) / std."""
EXCERPT = 300
"""Characters of a prompt or response that an error message quotes."""
NOTE = 1000
"""Characters of a note that are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInputs:
    """One rollout as a reward sees it: text first, tokens for those who count them."""

    prompt: str | Sequence[Message]
    """The task's prompt: text, or chat messages."""
    response: str
    """What the policy wrote, special tokens skipped; with several turns, observations too."""
    messages: Sequence[Message] = ()
    """The whole conversation, the response included."""
    label: Any = None
    task: Mapping[str, Any] = field(default_factory=dict)
    """All columns of the task's row."""
    tokens: Sequence[int] | np.ndarray = field(default=(), compare=False)
    """[n] ids of the action tokens: what the policy sampled, observations not included."""
    finish_reason: FinishReason = "stop"
    turns: int = 1
    """Engine calls in the rollout."""
    group_id: int = 0
    index: int = 0
    """Position within the group: 0 … G − 1."""
    task_id: str = ""
    source: str = "data"
    """Name of the data set that the task comes from."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """What the agent recorded about the episode."""

    @property
    def response_tokens(self) -> int:
        """Number of action tokens."""
        return len(self.tokens)

    @property
    def prompt_text(self) -> str:
        """The prompt as plain text; chat messages one after the other, each as `role: content`."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{m.get('role', '?')}: {m.get('content', '')}" for m in self.prompt)

    def describe(self) -> str:
        """A few lines that identify the sample in an error message."""
        return (
            f"task {self.task_id or '?'}, rollout {self.index} of group {self.group_id}\n"
            f"prompt:   {excerpt(self.prompt_text)}\n"
            f"response: {excerpt(self.response)}\n"
            f"label:    {excerpt(repr(self.label))}"
        )


@dataclass(frozen=True, slots=True)
class Reward:
    """A score with numbers to log beside it.

    Args:
        score: finite; None when the reward doesn't apply to this sample: it then adds nothing and
            is left out of means (a rollout to which no reward applies counts as failed).
        parts: what the score is made of, logged as `reward/<component>/<part>`.
        metrics: other numbers, logged as `<component>/<key>`.
        note: why the score is what it is, for people: it stands beside the rollout in the files.
    """

    score: float | None
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""


def reward_inputs_of(rollout: Rollout) -> RewardInputs:
    """Return what rewards see of a rollout."""
    task = rollout.task
    spans = [rollout.tokens[span.start : span.stop] for span in rollout.spans]
    return RewardInputs(
        prompt=task.prompt,
        response=rollout.text,
        messages=rollout.messages or conversation(task.prompt, rollout.text),
        label=task.label,
        task=dict(task.columns),
        tokens=np.concatenate(spans) if spans else np.zeros(0, np.int32),
        finish_reason=rollout.finish_reason,
        turns=len(rollout.spans),
        group_id=rollout.group_id,
        index=rollout.index,
        task_id=task.id,
        source=task.source,
        metadata=rollout.metrics,
    )


def conversation(prompt: str | Sequence[Message], response: str) -> list[Message]:
    """Return prompt and response as chat messages; a text prompt is one user message."""
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*before, {"role": "assistant", "content": response}]


def as_reward(value: object) -> Reward:
    """Return what a reward function returned as a `Reward` of plain floats.

    Accepts int, float, bool, NumPy and torch scalars, `Reward` and None (does not apply).
    Raises `TypeError` for anything else and `ValueError` for numbers that are not finite; an
    exception, with which a reward of several samples says that this one failed, is raised.
    """
    if isinstance(value, Exception):
        raise value
    if value is None:
        return Reward(None)
    if isinstance(value, Reward):
        return Reward(
            None if value.score is None else _number(value.score, "score"),
            {str(k): _number(v, f"part {k!r}") for k, v in value.parts.items()},
            {str(k): _number(v, f"metric {k!r}") for k, v in value.metrics.items()},
            # Files are UTF-8, and a program's messages need not be.
            str(value.note)[:NOTE].encode(errors="replace").decode(),
        )
    return Reward(_number(value, "value"))


def excerpt(text: str, limit: int = EXCERPT) -> str:
    """Return one line of at most `limit` characters: the end of a long text counts as much as its
    start, because answers stand last."""
    line = text.replace("\n", "\\n")
    if len(line) <= limit:
        return line
    head = limit // 3
    return f"{line[:head]} … {line[-(limit - head - 3) :]}"


def _number(value: object, what: str) -> float:
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "shape", None) in ((), (1,)):
        value = item()  # 0-d arrays and tensors, without importing their library
    if not isinstance(value, (numbers.Real, np.bool_)):
        raise TypeError(
            f"a reward returns a number, rlx.Reward or None; "
            f"its {what} is {type(value).__name__} {excerpt(repr(value), 120)}"
        )
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a reward must be finite; its {what} is {number}")
    return number
