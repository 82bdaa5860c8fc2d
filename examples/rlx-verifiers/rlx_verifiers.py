"""Environments written for verifiers, trained with rlx: `load` reads their data, `Verifiers` plays.

An environment asks its client for chat completions; here the client is the episode, so every call
goes to the policy and is accounted for token by token. The rubric's reward is the episode's.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import verifiers
from openai.types import Completion
from openai.types.chat import ChatCompletion

from rlx import Episode, UsageError, component, parse_tool_calls


def load(
    *, env: str, size: int = -1, seed: int | None = None, split: str = "train", **args: Any
) -> list[dict[str, Any]]:
    """The environment's rows, and in each what the agent needs to make the environment again.

    Args:
        env: name of the environment's module (`my_env`, or `owner/my-env` as on the hub).
        size: rows; -1: all.
        split: `train`, or anything else for the evaluation data.
        args: of the environment's `load_environment`.

    Raises UsageError for an environment that can't be loaded, or whose rubric compares rollouts.
    """
    environment = load_environment(env, json.dumps(args, default=str))
    dataset = environment.get_dataset if split == "train" else environment.get_eval_dataset
    rows = []
    for row in dataset(n=size, seed=seed):
        rows.append(
            {
                "prompt": row["prompt"],
                "label": row.get("answer"),
                "verifiers_row": json.dumps(dict(row), default=str),
                "verifiers_env": env,
                "verifiers_args": json.dumps(args, default=str),
            }
        )
    return rows


_PROMPT = [{"role": "user", "content": "reverse ab="}]
_EXAMPLE = {
    "prompt": _PROMPT,
    "label": "ba",
    "verifiers_env": "rlx-verifiers-demo",
    "verifiers_args": "{}",
    "verifiers_row": json.dumps({"prompt": _PROMPT, "answer": "ba", "example_id": 0}),
}


@component(form="free", example_columns=_EXAMPLE)
class Verifiers:
    """Let the task's environment talk to the policy, and reward as its rubric does.

    Args:
        format: of the tool calls in the model's text: `auto`, `hermes` or `json`.
    """

    def __init__(self, *, format: str = "auto") -> None:
        parse_tool_calls("", format)
        self._format = format

    async def run(self, episode: Episode) -> None:
        columns = episode.task.columns
        if "verifiers_env" not in columns:
            raise UsageError(
                "the task names no environment", where="data.path", fix="--data rlx_verifiers:load"
            )
        environment = load_environment(columns["verifiers_env"], columns["verifiers_args"])
        state = await environment.rollout(
            json.loads(columns["verifiers_row"]), client_of(episode, self._format), "policy", {}
        )
        if not episode.turns:  # it failed before it asked; with a turn, it is rewarded all the same
            raise RuntimeError(f"the environment ended with {state.get('error')!r}")
        await environment.rubric.score_rollout(state, score_sem=contextlib.nullcontext())
        episode.reward(float(state["reward"] or 0.0))
        for name, value in (state["metrics"] or {}).items():
            episode.metric(name, float(value))
        completion = state.get("completion") or []
        said = [m for m in completion if isinstance(m, Mapping) and m.get("role") == "assistant"]
        if said:
            episode.response = str(said[-1].get("content") or "")


@functools.cache
def load_environment(env: str, args: str) -> Any:
    """`verifiers.load_environment` with arguments as JSON; its mistakes are UsageErrors."""
    logging.getLogger("verifiers").setLevel(logging.WARNING)
    try:
        environment = verifiers.load_environment(env, **json.loads(args))
    except Exception as error:
        raise UsageError(
            f"the environment {env!r} can't be loaded: {error}", where="data.params.env"
        ) from error
    if any(_compares(rubric) for rubric in _rubrics(environment.rubric)):
        raise UsageError(
            f"the rubric of {env!r} compares the rollouts of a group",
            where="data.params.env",
            fix="a rubric that rewards each rollout by itself",
        )
    return environment


def _rubrics(rubric: Any) -> list[Any]:
    """A rubric, or those that a group of rubrics is made of."""
    return [one for part in getattr(rubric, "rubrics", ()) for one in _rubrics(part)] or [rubric]


def _compares(rubric: Any) -> bool:
    return any(rubric._is_group_func(function) for function in rubric._get_reward_funcs())


def client_of(episode: Episode, format: str) -> Any:
    """What environments take for an `openai.AsyncOpenAI`: two methods that ask the policy."""

    async def chat(
        *, messages: Sequence[Any], model: str, tools: Sequence[Any] | None = None, **options: Any
    ) -> ChatCompletion:
        def show(text: str) -> dict[str, Any]:
            return _message(text, format if tools else None)

        reply = await episode.answer(
            [_plain(message) for message in messages],
            tools=list(tools) if tools else None,
            show=show,
            **_limit(episode, options),
        )
        message = dict(reply.message)
        reason = "tool_calls" if message.get("tool_calls") else _reason(reply)
        choice = {"index": 0, "message": message, "finish_reason": reason}
        return ChatCompletion.model_validate(
            {**_head(model, reply), "object": "chat.completion", "choices": [choice]}
        )

    async def complete(*, prompt: str, model: str, **options: Any) -> Completion:
        reply = await episode.complete(prompt, **_limit(episode, options))
        choice = {"index": 0, "text": reply.text, "finish_reason": _reason(reply)}
        return Completion.model_validate(
            {**_head(model, reply), "object": "text_completion", "choices": [choice]}
        )

    return SimpleNamespace(
        chat=SimpleNamespace(completions=SimpleNamespace(create=chat)),
        completions=SimpleNamespace(create=complete),
        base_url="rlx://episode",
    )


def _plain(message: Any) -> dict[str, Any]:
    """A message as a dictionary, whichever type it came as."""
    dump = getattr(message, "model_dump", None)
    return dump(exclude_none=True) if callable(dump) else dict(message)


def _message(text: str, format: str | None) -> dict[str, Any]:
    """The assistant's message, with the tool calls of its text where there are tools."""
    if format is None:
        return {"role": "assistant", "content": text}
    said = parse_tool_calls(text, format)
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = [
            {
                "id": f"call_{secrets.token_hex(8)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in said.calls
        ]
    return message


def _limit(episode: Episode, options: Mapping[str, Any]) -> dict[str, int]:
    """Sampling is the run's; an environment may ask for shorter answers."""
    most = options.get("max_completion_tokens") or options.get("max_tokens")
    return {"max_new_tokens": min(most, episode.sampling.max_new_tokens)} if most else {}


def _reason(reply: Any) -> str:
    return "length" if reply.finish_reason == "length" else "stop"


def _head(model: str, reply: Any) -> dict[str, Any]:
    sampled = len(reply.tokens)
    return {
        "id": f"rlx-{secrets.token_hex(8)}",
        "created": int(time.time()),
        "model": model,
        "usage": {
            "prompt_tokens": reply.prompt_length,
            "completion_tokens": sampled,
            "total_tokens": reply.prompt_length + sampled,
        },
    }
