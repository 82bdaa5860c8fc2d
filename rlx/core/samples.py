"""The samples of a task as they lie on disk: what `rlx generate` writes and chooses from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rlx.core.evaluation import CUT_OFF, Scoring
from rlx.core.rollouts import Group, Message, Rollout, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One attempt at a task."""

    index: int
    """Position among the task's samples."""
    response: str
    """Text after the prompt without special tokens, observations of several turns included."""
    messages: Sequence[Message]
    """The same as chat messages; empty when the prompt is plain text."""
    reward: float
    """Weighted sum of the rewards, with what the agent gave per turn."""
    parts: Mapping[str, float]
    """Reward by component name, before weights."""
    tokens: int
    """Tokens that the model sampled."""
    turns: int
    finish_reason: str

    @property
    def truncated(self) -> bool:
        """Whether it ran out of tokens."""
        return self.finish_reason in CUT_OFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTask:
    """A task with its samples; none when a reward failed under the policy `drop_group`."""

    number: int
    """Place of the task in the data."""
    id: str
    source: str
    prompt: str | Sequence[Message]
    label: Any
    samples: Sequence[Sample]

    @property
    def chat(self) -> bool:
        """Whether the prompt went through the chat template."""
        return not isinstance(self.prompt, str)

    @classmethod
    def of(cls, number: int, task: Task, group: Group | None) -> SampledTask:
        """From a group of rollouts; None: it was dropped."""
        return cls(
            number=number,
            id=task.id,
            source=task.source,
            prompt=task.prompt,
            label=task.label,
            samples=[_sample(rollout) for rollout in group.rollouts] if group else [],
        )

    def is_of(self, task: Task) -> bool:
        """Whether these are samples of `task`: the same row of the data with the same prompt."""
        prompt = task.prompt if isinstance(task.prompt, str) else _plain(list(task.prompt))
        return self.id == task.id and self.prompt == prompt

    def to_json(self) -> str:
        """One line without its end."""
        return json.dumps(asdict(self), ensure_ascii=False, default=str)

    @classmethod
    def from_json(cls, line: str | bytes) -> SampledTask:
        """Raises ValueError, KeyError or TypeError for anything that `to_json` did not write."""
        value = json.loads(line)
        samples = [Sample(**sample) for sample in value.pop("samples")]
        return cls(**value, samples=samples)


def _sample(rollout: Rollout) -> Sample:
    prompt = rollout.task.prompt
    return Sample(
        index=rollout.index,
        response=rollout.text,
        messages=[] if isinstance(prompt, str) else list(rollout.messages[len(prompt) :]),
        reward=float(Scoring().score(rollout) or 0.0),
        parts=dict(rollout.parts),
        tokens=rollout.action_count,
        turns=len(rollout.spans),
        finish_reason=rollout.finish_reason,
    )


def _plain(value: Any) -> Any:
    """As it comes back from JSON."""
    return json.loads(json.dumps(value, default=str))
