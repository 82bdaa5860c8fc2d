"""Verify and try again: a wrong answer gets feedback and another turn, up to `attempts`.

    reward of turn i  =  reward · discount^i   when it is right, else 0

The check is the label's text at the end of the answer, so that the model may reason before it.
Select it with rewards that you want in addition (they judge the whole rollout).
"""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from rlx.core.agents import Step, Turn
from rlx.core.component import component
from rlx.core.errors import ComponentError


@component(needs_label=True, form="step")
async def retry(
    turn: Turn,
    *,
    attempts: Annotated[int, Ge(1)] = 3,
    feedback: str = "That is not right. Try again.",
    reward: float = 1.0,
    discount: Annotated[float, Ge(0), Le(1)] = 0.5,
) -> Step:
    """Answer, be told whether it is right, and answer again.

    Args:
        attempts: most turns.
        feedback: what the model is told after a wrong answer; in plain-text tasks it is put on a
            line of its own.
        reward: of a right answer on the first turn.
        discount: factor for each turn that was needed before.
    """
    if turn.task.label is None:
        raise ComponentError(f"task {turn.task.id} has no label to check the answer with")
    right = turn.action.strip().rstrip(".").endswith(str(turn.task.label).strip())
    if right or turn.index + 1 >= attempts:
        return Step(
            reward=reward * discount**turn.index if right else 0.0,
            done=True,
            metrics={"attempts": turn.index + 1.0, "solved": float(right)},
        )
    return Step(observation=turn.say(feedback) if turn.chat else f"\n{feedback}\n")
