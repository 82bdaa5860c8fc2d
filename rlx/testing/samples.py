"""Build `RewardInputs` from plain values, to try a reward without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.rewards import RewardInputs, conversation
from rlx.core.rollouts import FinishReason, Message


def reward_inputs(
    *,
    prompt: str | Sequence[Message] = "",
    response: str = "",
    label: Any = None,
    tokens: Sequence[int] | int | None = None,
    finish_reason: FinishReason = "stop",
    messages: Sequence[Message] | None = None,
    turns: int = 1,
    group_id: int = 0,
    index: int = 0,
    task_id: str = "test/0",
    source: str = "test",
    metadata: Mapping[str, Any] | None = None,
    **columns: Any,
) -> RewardInputs:
    """Return the inputs of one sample; further keywords are columns of its task.

    Args:
        tokens: ids of the action tokens, or their number; unset: one token per word of `response`.

    >>> reward_inputs(prompt="1+1=", response="2", label="2", level=3).task
    {'prompt': '1+1=', 'label': '2', 'level': 3}
    """
    if tokens is None:
        tokens = len(response.split())
    ids = tuple(range(tokens)) if isinstance(tokens, int) else tuple(tokens)
    return RewardInputs(
        prompt=prompt,
        response=response,
        messages=conversation(prompt, response) if messages is None else messages,
        label=label,
        task={"prompt": prompt, "label": label, **columns},
        tokens=ids,
        finish_reason=finish_reason,
        turns=turns,
        group_id=group_id,
        index=index,
        task_id=task_id,
        source=source,
        metadata=metadata or {},
    )
