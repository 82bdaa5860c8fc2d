"""OpenRLHF agent files, unchanged: `--agent openrlhf:agent_func.py`.

A file has an `AgentExecutor`, most often over an environment with `reset` and `step`. It is given
an engine that samples the turns of the episode: token ids in, token ids out, as it expects. What it
returns of tokens is not needed, because the episode keeps the account; its rewards are taken, each
step's on its turn, and its `scores` and `extra_logs` are logged.
https://github.com/OpenRLHF/OpenRLHF/tree/main/examples/python
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rlx.core.agents import Episode
from rlx.core.component import component
from rlx.core.errors import ComponentError, UsageError
from rlx.core.importing import import_target
from rlx.core.references import ComponentRef, source_hash
from rlx.core.turns import Reply
from rlx.plugins.agents._openrlhf_base import AgentExecutorBase, provide

PREFIX = "openrlhf:"


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """The attributes of vLLM's class that agent files read and set."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    logprobs: int | None = 1
    stop: Any = None
    stop_token_ids: Sequence[int] | None = None
    min_tokens: int = 0
    skip_special_tokens: bool = False
    include_stop_str_in_output: bool = True
    extra_args: dict[str, Any] = field(default_factory=dict)


class Engine:
    """What an executor knows as its `llm_engine`; samples the turns of one episode."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._loop = asyncio.get_running_loop()
        self.given = 0.0
        """Rewards that turns have been given."""

    async def generate(self, prompt_token_ids: Sequence[int], sampling_params: Any) -> Any:
        """vLLM's `RequestOutput`, as far as agent files look at it."""
        prompt = [int(token) for token in prompt_token_ids]
        call = self._episode.complete(prompt, **_options(sampling_params, self._episode))
        if asyncio.get_running_loop() is self._loop:
            reply = await call
        else:  # a server of the executor's own, in a thread with a loop of its own
            future = asyncio.run_coroutine_threadsafe(call, self._loop)
            reply = await asyncio.wrap_future(future)
        tokenizer = self._episode.tokenizer
        output = SimpleNamespace(
            token_ids=[*reply.tokens],
            text=str(tokenizer.decode([*reply.tokens], skip_special_tokens=False)),
            finish_reason=reply.finish_reason,
            stop_reason=reply.stop,
            logprobs=_logprobs(reply),
            cumulative_logprob=sum(reply.logprobs),
        )
        return SimpleNamespace(outputs=[output], prompt_token_ids=prompt, finished=True)

    def reward(self, value: float) -> None:
        """Give the last turn a reward."""
        self._episode.reward(value)
        self.given += value


def adapt(found: Any) -> type:
    """The component for an agent file's `AgentExecutor`, or for an environment's class."""
    if not inspect.isclass(found):
        raise UsageError(
            f"{found!r} is no class", where="agent", fix="openrlhf:file.py:AgentExecutor"
        )

    @component(form="free")
    class OpenRLHFAgent:
        """An agent from an OpenRLHF agent file."""

        async def run(self, episode: Episode) -> None:
            await _run(found, episode)

    OpenRLHFAgent.__name__ = OpenRLHFAgent.__qualname__ = found.__name__
    OpenRLHFAgent.__module__ = found.__module__
    return OpenRLHFAgent


def resolve(reference: str) -> ComponentRef:
    """The reference for `openrlhf:file.py[:class]`; raises UsageError for a file that fails."""
    provide()
    place, _, name = reference.removeprefix(PREFIX).partition(":")
    target = f"{_absolute(place)}:{name or 'AgentExecutor'}"
    found = import_target(target, label=f"agent {reference!r}")
    return ComponentRef(
        kind="agents",
        name=reference,
        target=target,
        source_hash=source_hash(found, target),
        search_path=(str(Path(_absolute(place)).parent),) if place.endswith(".py") else (),
        adapter=f"{__name__}:adapt",
    )


def _absolute(place: str) -> str:
    return str(Path(place).expanduser().resolve()) if place.endswith(".py") else place


async def _run(found: type, episode: Episode) -> None:
    run = episode.sampling
    engine = Engine(episode)
    given = {
        "prompt": _prompt(episode),
        "label": episode.task.label,
        "sampling_params": SamplingParams(
            max_tokens=run.max_new_tokens,
            temperature=run.temperature,
            top_p=run.top_p,
            top_k=run.top_k or -1,
        ),
        "max_length": episode.limits.context_length,
        "hf_tokenizer": episode.tokenizer,
        "llm_engine": engine,
    }
    executor = _executor(found, given)
    takes = inspect.signature(executor.execute).parameters
    result = await executor.execute(**{k: v for k, v in given.items() if k in takes})
    if result is None:
        return
    if not isinstance(result, Mapping):
        raise ComponentError(f"its execute returned {type(result).__name__}, not a dict")
    _take(result, episode, engine)


def _executor(found: type, given: Mapping[str, Any]) -> Any:
    """An executor of the episode's own. Older files' take the engine here, not in `execute`."""
    if not hasattr(found, "execute"):
        return _with_engine(AgentExecutorBase(found), given)
    wanted = inspect.signature(found.__init__).parameters  # type: ignore[misc]
    known = {**given, "max_steps": None, "result_queue": None}
    executor = found(**{
        name: known.get(name)
        for name, parameter in wanted.items()
        if name != "self"
        and parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    })  # fmt: skip
    return _with_engine(executor, given)


def _with_engine(executor: Any, given: Mapping[str, Any]) -> Any:
    for name in ("max_length", "hf_tokenizer", "llm_engine"):
        if getattr(executor, name, None) is None:
            setattr(executor, name, given[name])
    return executor


def _prompt(episode: Episode) -> str:
    """The prompt as text, chat template applied."""
    task = episode.task
    if isinstance(task.prompt, str):
        return task.prompt
    return str(episode.tokenizer.decode([*task.tokens], skip_special_tokens=False))


def _options(asked: Any, episode: Episode) -> dict[str, Any]:
    """Options of one engine call; raises ComponentError for another distribution than the run's."""
    run = episode.sampling
    for name in ("temperature", "top_p"):
        value = getattr(asked, name, None)
        if run.temperature and value is not None and abs(value - getattr(run, name)) > 1e-6:
            raise ComponentError(
                f"its sampling parameters have {name}={value:g}, but the run samples with "
                f"rollout.{name}={getattr(run, name):g}"
            )
    options: dict[str, Any] = {}
    if (most := getattr(asked, "max_tokens", None)) is not None:
        options["max_new_tokens"] = max(1, min(int(most), run.max_new_tokens))
    if stop := getattr(asked, "stop", None):
        options["stop"] = stop
    if ids := getattr(asked, "stop_token_ids", None):
        options["stop_token_ids"] = tuple(ids)
    return options


def _logprobs(reply: Reply) -> list[dict[int, Any]]:
    return [
        {token: SimpleNamespace(logprob=value)}
        for token, value in zip(reply.tokens, reply.logprobs, strict=True)
    ]


def _take(result: Mapping[str, Any], episode: Episode, engine: Engine) -> None:
    """Rewards and logs. What turns have been given already is part of the total."""
    if result.get("reward") is not None:
        rest = float(result["reward"]) - engine.given
        if rest:
            episode.reward(rest)
    if result.get("scores") is not None:
        episode.metric("scores", float(result["scores"]))
    for name, value in (result.get("extra_logs") or {}).items():
        episode.metric(name, float(value))
