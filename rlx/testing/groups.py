"""Build a `Group` from plain values, to try a sampler or a hook without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.core.errors import UsageError
from rlx.core.rollouts import Group, Rollout, Span, Task


def group_inputs(
    *,
    rewards: Sequence[float],
    responses: Sequence[str] | None = None,
    parts: Mapping[str, Sequence[float]] | None = None,
    prompt: str = "How much is 2 + 2?",
    label: Any = None,
    task_id: str = "test/0",
    source: str = "test",
    group_id: int = 0,
    **columns: Any,
) -> Group:
    """Return a finished group; further keywords are columns of its task. A token is a character.

    Args:
        rewards: [G].
        responses: [G] texts of at least one character; unset: "4" for all.
        parts: reward components by name, [G] each.

    Raises:
        UsageError: lists of different lengths.

    >>> group_inputs(rewards=[0.0, 1.0]).rewards
    [0.0, 1.0]
    """
    texts = ["4"] * len(rewards) if responses is None else list(responses)
    for name, values in {"responses": texts, **(parts or {})}.items():
        if len(values) != len(rewards):
            raise UsageError(
                f"{len(values)} values for {len(rewards)} rollouts", where=name, fix="one each"
            )
    task = Task(
        id=task_id,
        prompt=prompt,
        tokens=[ord(character) for character in prompt],
        label=label,
        source=source,
        columns={"prompt": prompt, "label": label, **columns},
    )
    rollouts = [
        _rollout(
            task, group_id, index, text, reward, {k: v[index] for k, v in (parts or {}).items()}
        )
        for index, (text, reward) in enumerate(zip(texts, rewards, strict=True))
    ]
    return Group(id=group_id, task=task, rollouts=rollouts)


def _rollout(
    task: Task, group: int, index: int, text: str, reward: float, parts: Mapping[str, float]
) -> Rollout:
    start = len(task.tokens)
    span = Span(start=start, stop=start + len(text), version=0, finish_reason="stop")
    return Rollout(
        task=task,
        group_id=group,
        index=index,
        tokens=np.array([*task.tokens, *map(ord, text)], dtype=np.int32),
        spans=(span,),
        logprobs=np.full(len(text), -0.5, dtype=np.float32),
        text=text,
        finish_reason="stop",
        reward=reward,
        parts=parts,
    )
