"""Gymnasium environments as text games: `load` makes the tasks, `play` is the agent.

A task is an environment with a seed; its prompt says what there is to do and shows the first
observation. Each turn the model names an action and is shown what came of it; the environment's
rewards are the turns' rewards.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge

from rlx import Episode, UsageError, component

_MARKED = re.compile(r"\x1b\[(?:[\d;]*;)?4\d(?:;[\d;]*)?m(.*?)\x1b\[0m", re.DOTALL)
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


def load(
    *,
    env: str,
    actions: Sequence[str] = (),
    size: int = 1024,
    seed: int = 0,
    instructions: str = "",
    options: Mapping[str, Any] | None = None,
    split: str = "train",
) -> list[dict[str, Any]]:
    """Rows: an environment with a seed each, and the prompt that opens the game.

    Args:
        env: its id (`FrozenLake-v1`, or `module:Id-v0`, which imports the module first).
        actions: names of a discrete space's actions, in their order; unset: 0, 1, 2, …
        instructions: what the model is told before the first observation.
        options: keyword arguments of the environment.

    Raises UsageError for an environment that is not there, or whose actions are no text.
    """
    game = make(env, options)
    try:
        names = _names(game, actions)
        how = f"Answer with one of: {', '.join(names)}." if names else "Answer with your move."
        first = seed + (1_000_003 if split != "train" else 0)
        rows = []
        for number in range(first, first + size):
            observation, _ = game.reset(seed=number)
            lines = [instructions, how, show(game, observation)]
            rows.append(
                {
                    "prompt": "\n".join(line for line in lines if line) + "\n",
                    "env": env,
                    "options": json.dumps(dict(options or {})),
                    "actions": json.dumps(list(names)),
                    "game_seed": number,
                }
            )
        return rows
    finally:
        game.close()


_EXAMPLE = {
    "prompt": "Answer with one of: left, down, right, up.\n",
    "env": "FrozenLake-v1",
    "options": "{}",
    "actions": '["left", "down", "right", "up"]',
    "game_seed": 0,
}


@component(form="free", example_columns=_EXAMPLE)
async def play(
    episode: Episode,
    *,
    max_turns: Annotated[int, Ge(1)] = 20,
    invalid_reward: float = -0.1,
) -> None:
    """Play the task's environment until it ends.

    Args:
        max_turns: engine calls.
        invalid_reward: for an answer that names no action; the game then stands still.
    """
    row = episode.task.columns
    if "env" not in row:
        raise UsageError(
            "the task names no environment", where="data.path", fix="--data rlx_gymnasium:load"
        )
    names = json.loads(row["actions"])
    game = await asyncio.to_thread(make, row["env"], json.loads(row["options"]))
    invalid, total = 0, 0.0
    try:
        await asyncio.to_thread(game.reset, seed=int(row["game_seed"]))
        for _ in range(max_turns):
            reply = await episode.generate()
            action = choose(reply.text, names, game)
            if action is None:
                invalid += 1
                episode.reward(invalid_reward)
                _tell(episode, f"That is no action. Answer with one of: {', '.join(names)}.")
                continue
            step = await asyncio.to_thread(game.step, action)
            observation, reward, terminated, truncated, _ = step
            episode.reward(float(reward))
            total += float(reward)
            if terminated or truncated:
                return
            _tell(episode, show(game, observation))
    finally:
        episode.metric("invalid_actions", invalid)
        episode.metric("return", total)
        await asyncio.to_thread(game.close)


def make(env: str, options: Mapping[str, Any] | None) -> Any:
    """The environment, with text rendering where it has that. Raises UsageError."""
    import gymnasium

    given = dict(options or {})
    try:
        game = gymnasium.make(env, **given)
        if "render_mode" in given or "ansi" not in game.metadata.get("render_modes", ()):
            return game
        game.close()
        return gymnasium.make(env, render_mode="ansi", **given)
    except (gymnasium.error.Error, ImportError, TypeError) as error:
        raise UsageError(str(error), where="data.params.env") from error


def show(game: Any, observation: Any) -> str:
    """What the model sees: the environment's own text, else the observation's `repr`.

    A character that a terminal would highlight (the player's place) stands in brackets.
    """
    if isinstance(observation, str):
        return observation
    if game.render_mode == "ansi" and isinstance(text := game.render(), str):
        return _COLOURS.sub("", _MARKED.sub(r"[\1]", text)).strip("\n")
    return str(getattr(observation, "tolist", lambda: observation)())


def choose(text: str, names: Sequence[str], game: Any) -> Any:
    """The action that an answer names last; None when it names none."""
    if not names:
        return text.strip() if text.strip() in game.action_space else None
    found = [
        (match.start(), index)
        for index, name in enumerate(names)
        for match in re.finditer(rf"\b{re.escape(name)}\b", text, re.IGNORECASE)
    ]
    start = getattr(game.action_space, "start", 0)
    return start + max(found)[1] if found else None


def _names(game: Any, actions: Sequence[str]) -> list[str]:
    from gymnasium import spaces

    space = game.action_space
    if isinstance(space, spaces.Text):
        return []
    if not isinstance(space, spaces.Discrete):
        raise UsageError(
            f"the actions of {game.spec.id} are {space}, which can't be named in text",
            where="data.params.env",
            fix="an environment with discrete actions or text",
        )
    if actions and len(actions) != space.n:
        raise UsageError(
            f"{game.spec.id} has {space.n} actions, not {len(actions)}",
            where="data.params.actions",
        )
    return list(actions) or [str(number) for number in range(space.n)]


def _tell(episode: Episode, text: str) -> None:
    if episode.chat:
        episode.observe({"role": "user", "content": text})
    else:
        episode.observe(f"\n{text}\n")
