"""`check_agent`: what every agent must hold, in the step form and in the free form."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.agents import Episode, Limits, run_agent
from rlx.core.component import Bound
from rlx.core.engine.interfaces import Sampling
from rlx.core.rollouts import Rollout, Task
from rlx.testing.cases import require
from rlx.testing.components import bind, check_parameters, check_travel
from rlx.testing.episodes import agent_task
from rlx.testing.rewards import COLUMNS_TAG
from rlx.testing.scripted import CharTokenizer, ScriptedEngine, task
from rlx.testing.violations import EXAMPLES, Broken, Checker, label_of

_REPLIES = ("4", "The answer is 5.", "no", "")
_SECONDS = 5.0
"""Longest that an episode of a scripted engine may take."""
_TURNS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Play:
    """An episode: the task, what the engine answers, and the limits."""

    task: Task
    script: tuple[str | None, ...]
    max_turns: int = _TURNS
    seed: int = 0

    def __str__(self) -> str:
        shown = [reply if reply is not None else "(cut off)" for reply in self.script]
        prompt = self.task.prompt
        return f"prompt={prompt!r}, label={self.task.label!r}, replies={shown}, seed={self.seed}"


def check_agent(
    target: Any,
    *,
    tasks: Sequence[Task] | None = None,
    examples: int = EXAMPLES,
    **params: Any,
) -> None:
    """Check an agent against a scripted engine; raises `ConformanceError`.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        tasks: tasks to play, where the agent needs columns or labels of a certain form, made with
            `agent_task`; unset: a sum, or a row with the columns of the component's tag
            `example_columns`.
        examples: generated episodes per rule.
        params: parameters of the component.
    """
    bound = bind("agents", target, params)
    if tasks is None and COLUMNS_TAG in bound.tags.extra:
        tasks = [agent_task(**bound.tags.extra[COLUMNS_TAG])]
    checker = Checker(f"agent {label_of(target)}", examples=examples)
    # a copy for each episode: one that an agent changed must not reach the next
    given = st.sampled_from(list(tasks or (task(),))).map(copy.deepcopy)
    replies = st.lists(st.sampled_from(_REPLIES), min_size=1, max_size=4).map(tuple)
    ordinary = st.builds(
        lambda t, s, n: Play(task=t, script=s, seed=n), given, replies, st.integers(0, 3)
    )
    if checker.holds("plays an episode to its end", ordinary, lambda p: _plays(bound, p)):
        _check_episodes(checker, bound, ordinary)
        _check_manners(checker, bound, ordinary)
        first = Play(task=(tasks or (task(),))[0], script=("5", "4"))
        check_travel(checker, bound, first, play_tokens, _equal)
    check_parameters(checker, bound)
    checker.finish()


def _check_episodes(checker: Checker, bound: Bound, plays: SearchStrategy[Play]) -> None:
    checker.holds(
        "trains on exactly the tokens that the engine sampled", plays, lambda p: _tokens(bound, p)
    )
    checker.holds(
        "copes with a reply that is cut off",
        plays.map(lambda p: replace(p, script=(None, *p.script))),
        lambda p: _plays(bound, p),
    )
    checker.holds(
        "ends when the limit on turns is reached",
        plays.map(lambda p: replace(p, script=("?",), max_turns=2)),
        lambda p: _plays(bound, p),
    )
    checker.holds(
        "copes with a chat prompt",
        plays.map(_as_chat),
        lambda p: _plays(bound, p),
    )
    if not bound.tags.needs_label:
        checker.holds(
            "copes with a task without label, or declares needs_label=True",
            plays.map(lambda p: replace(p, task=replace(p.task, label=None))),
            lambda p: _plays(bound, p),
        )


def _check_manners(checker: Checker, bound: Bound, plays: SearchStrategy[Play]) -> None:
    checker.holds("leaves the task as it is", plays, lambda p: _mutates(bound, p))
    checker.holds("is deterministic for a seed", plays, lambda p: _deterministic(bound, p))
    pairs = st.tuples(plays, plays)
    checker.holds(
        "keeps episodes that run side by side apart", pairs, lambda both: _apart(bound, *both)
    )


def play(bound: Bound, game: Play) -> tuple[Rollout, ScriptedEngine]:
    """Run one episode."""
    rollout, engine = asyncio.run(_timed(bound, game))
    return rollout, engine


def play_tokens(bound: Bound, game: Play) -> tuple[list[int], float, str]:
    """Return what an episode comes to, in values that can be compared."""
    return _outcome(play(bound, game)[0])


async def _timed(bound: Bound, game: Play) -> tuple[Rollout, ScriptedEngine]:
    engine = ScriptedEngine(game.script)
    episode = Episode(
        task=game.task,
        group_id=0,
        index=0,
        seed=game.seed,
        generate=engine,
        tokenizer=CharTokenizer(),
        sampling=Sampling(max_new_tokens=50),
        limits=Limits(context_length=20_000, max_turns=game.max_turns),
    )
    try:
        return await asyncio.wait_for(run_agent(bound, episode), _SECONDS), engine
    except TimeoutError as error:
        raise Broken(
            f"the episode has not ended after {_SECONDS:g} s and {len(engine.calls)} engine calls"
        ) from error


def _outcome(rollout: Rollout) -> tuple[list[int], float, str]:
    reward = rollout.reward + sum(span.reward for span in rollout.spans)
    return rollout.tokens.tolist(), reward, rollout.finish_reason


def _plays(bound: Bound, game: Play) -> None:
    rollout, engine = play(bound, game)
    require(engine.calls, "ended without an engine call")
    require(np.isfinite(_outcome(rollout)[1]), f"gave the reward {_outcome(rollout)[1]}")


def _tokens(bound: Bound, game: Play) -> None:
    rollout, engine = play(bound, game)
    actions = [rollout.tokens[span.start : span.stop].tolist() for span in rollout.spans]
    sampled = [tokens for tokens in engine.sampled if tokens]
    # a call with stop texts keeps what was sampled up to the first of them
    require(
        len(actions) == len(sampled)
        and all(one == whole[: len(one)] for one, whole in zip(actions, sampled, strict=True)),
        f"the rollout has the action tokens {actions}, the engine sampled {engine.sampled}",
    )


def _as_chat(game: Play) -> Play:
    prompt = game.task.prompt
    if not isinstance(prompt, str):
        return game
    talk = task(prompt=[{"role": "user", "content": prompt}], label=game.task.label)
    return replace(game, task=replace(talk, columns=game.task.columns))


def _mutates(bound: Bound, game: Play) -> None:
    before = copy.deepcopy(game.task)
    play(bound, game)
    for name in ("prompt", "label", "columns", "tokens"):
        same = getattr(before, name) == getattr(game.task, name)
        require(same, f"changed task.{name} in place")


def _deterministic(bound: Bound, game: Play) -> None:
    first, second = play_tokens(bound, game), play_tokens(bound, game)
    require(first == second, f"two episodes end in {first} and {second}")


def _apart(bound: Bound, one: Play, other: Play) -> None:
    async def both() -> list[tuple[Rollout, ScriptedEngine]]:
        return list(await asyncio.gather(_timed(bound, one), _timed(bound, other)))

    alone = [play_tokens(bound, one), play_tokens(bound, other)]
    together = [_outcome(rollout) for rollout, _ in asyncio.run(both())]
    require(alone == together, f"alone they end in {alone}, side by side in {together}")


def _equal(first: Any, second: Any) -> bool:
    return bool(first == second)
