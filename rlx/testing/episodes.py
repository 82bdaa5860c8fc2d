"""An agent's episode without an engine: `play_agent`, and tasks for it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.agents import Episode, Limits, run_agent
from rlx.core.engine.interfaces import Sampling
from rlx.core.rollouts import Rollout, Task
from rlx.testing.components import bind
from rlx.testing.scripted import CharTokenizer, ScriptedEngine, task


def agent_task(
    *, prompt: str | list[dict[str, str]] = "How much is 2 + 2?", label: Any = None, **columns: Any
) -> Task:
    """Return a task for an agent, as a row with these columns gives it.

    Args:
        prompt: text, or chat messages.
        columns: the row's other columns.
    """
    made = task(prompt=prompt, label=label)
    return dataclasses.replace(made, columns={"prompt": prompt, "label": label, **columns})


def play_agent(
    target: Any,
    replies: Sequence[str],
    *,
    params: Mapping[str, Any] | None = None,
    seed: int = 0,
    **columns: Any,
) -> Rollout:
    """Return the rollout of an agent whose model says `replies`, over and over.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        params: parameters of the component.
        columns: of the task's row, `prompt` and `label` among them.

    A token is a character, an answer ends with token 0. Raises what the agent raises, as a run
    does.
    """
    bound = bind("agents", target, dict(params or {}))
    episode = Episode(
        task=agent_task(**columns),
        group_id=0,
        index=0,
        seed=seed,
        generate=ScriptedEngine(list(replies)),
        tokenizer=CharTokenizer(),
        sampling=Sampling(max_new_tokens=10_000),
        limits=Limits(context_length=1_000_000, max_turns=1000, step_timeout=60.0),
    )
    return asyncio.run(run_agent(bound, episode))
