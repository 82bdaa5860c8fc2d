"""Agents: how a task becomes a rollout, in two forms over one `Episode`.

Step form, the core drives: `async def step(turn: Turn, *, ...) -> Step`.
Free form, the agent drives: `async def run(episode: Episode, *, ...) -> None`.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rlx.core.conversation import Observation
from rlx.core.episode import ContextExceeded, Episode, EpisodeEnded, Generate, Limits, Reply
from rlx.core.errors import ComponentError, RlxError
from rlx.core.rollouts import FinishReason, Rollout, Task
from rlx.core.supervision import supervised
from rlx.core.threads import DaemonThreads

if TYPE_CHECKING:
    from rlx.core.references import Bound

__all__ = [
    "ContextExceeded",
    "Episode",
    "EpisodeEnded",
    "Generate",
    "Limits",
    "Observation",
    "Reply",
    "Step",
    "Turn",
    "agent_form",
    "run_agent",
]

log = logging.getLogger(__name__)
_threads = DaemonThreads("rlx-agent")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the step form is given after each engine call."""

    action: str
    """The sampled text, special tokens skipped."""
    observation: Observation
    """What the model answered to: the task's prompt, then the last step's observation."""
    task: Task
    index: int
    """0 for the first engine call."""
    state: dict[str, Any]
    """The episode's own; kept from turn to turn, empty at first."""
    metadata: dict[str, Any]
    """The task's columns. What an agent adds reaches rewards as `sample.task[...]`."""
    tokens: Sequence[int]
    """The sampled ids."""
    finish_reason: FinishReason
    seed: int
    """A function of the run's seed and the turn's place, for agents that draw random numbers."""
    chat: bool
    """The prompt went through the chat template."""

    def say(self, text: str, role: str = "user") -> Observation:
        """`text` in the form that fits the task: a chat message, or plain text."""
        return [{"role": role, "content": text}] if self.chat else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The step form's answer to a turn."""

    observation: Observation | None = None
    """Plain text (appended as it is), or chat messages; None ends the episode or, after a turn
    that was cut off, lets the model write on."""
    reward: float = 0.0
    """Of this turn; the rewards' scores of the whole rollout come on top."""
    done: bool = False
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers to log, averaged over the batch."""


async def run_agent(
    agent: Bound, episode: Episode, *, on_error: Literal["raise", "keep"] = "raise"
) -> Rollout:
    """Run an agent to the end of its episode, within the episode's limits.

    Args:
        agent: a component of the step form or the free form (`agent_form`).
        on_error: `raise` ends in ComponentError when the agent fails; `keep` logs the failure and
            gives what there is, with the finish reason `error` and the failure in `error`.

    Errors of the engine call and rlx's own pass through as they are.
    """
    drive = _drive if agent_form(agent) == "step" else _run_free
    try:
        reason = await supervised(drive(agent, episode), episode, name=agent.name)
        if episode.turns == 0 and episode.engine_error is None:
            raise ComponentError("it ended without an engine call")
    except EpisodeEnded as ended:
        reason = ended.reason
    except Exception as error:
        if episode.engine_error is not None:
            raise episode.engine_error from None
        if on_error == "raise":
            raise _failure(agent, episode, error) from error
        what = _described(error)
        log.warning(
            "agent %r failed in task %s, turn %d: %s",
            *(agent.name, episode.task.id, episode.turns, what),
        )
        return episode.rollout("error", error=what)
    if episode.engine_error is not None:  # the agent caught it
        raise episode.engine_error
    return episode.rollout(reason)


def _failure(agent: Bound, episode: Episode, error: Exception) -> RlxError:
    """What ends the run; a mistake of the configuration stays what it is."""
    if isinstance(error, RlxError) and not isinstance(error, ComponentError):
        return error
    place = f"task {episode.task.id}, turn {episode.turns}"
    return ComponentError(f"agent {agent.name!r} failed in {place}: {_described(error)}")


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, ComponentError) else f"{type(error).__name__}: {error}"


def agent_form(agent: Bound) -> Literal["step", "free"]:
    """Which of the two forms a component has.

    The tag `form` decides; else a method `step` or `run`; else the annotation or the name of the
    one positional parameter (`turn: Turn`, `episode: Episode`). Raises ComponentError otherwise.
    """
    form = agent.tags.extra.get("form")
    if form in ("step", "free"):
        return form  # type: ignore[no-any-return]
    instance = agent.instance
    if not inspect.isroutine(instance):
        for name, found in (("step", "step"), ("run", "free")):
            if callable(getattr(instance, name, None)):
                return found  # type: ignore[return-value]
    for hint in _hints(instance if inspect.isroutine(instance) else instance.__call__):
        word = hint.rsplit(".", 1)[-1].strip("'\"<>").lower()
        if word in ("turn", "episode"):
            return "step" if word == "turn" else "free"
    raise ComponentError(
        f"agent {agent.name!r} is neither step(turn: Turn) nor run(episode: Episode): "
        "annotate its positional parameter"
    )


@functools.lru_cache(maxsize=64)
def _hints(function: Callable[..., Any]) -> tuple[str, ...]:
    """Annotation and name of the first parameter. Signatures are dear, and each episode asks."""
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return () if first is None else (str(first.annotation), first.name)


def _method(agent: Bound, name: str) -> Callable[[Any], Any]:
    own = None if inspect.isroutine(agent.instance) else getattr(agent.instance, name, None)
    return own if callable(own) else agent


async def _run_free(agent: Bound, episode: Episode) -> None:
    result = _method(agent, "run")(episode)
    if not inspect.isawaitable(result):
        raise ComponentError("it must be `async def`: it drives the episode")
    if (value := await result) is not None:
        raise ComponentError(
            f"it returned {type(value).__name__}: an agent of the free form returns nothing "
            "(episode.reward, episode.metadata and episode.metric take results)"
        )


async def _drive(agent: Bound, episode: Episode) -> FinishReason | None:
    """The step form's loop; returns the finish reason where it is not the last turn's own."""
    step = _method(agent, "step")
    observation: Observation = episode.task.prompt
    while True:
        index = episode.turns
        reply = await episode.generate()
        turn = Turn(
            action=reply.text,
            observation=observation,
            task=episode.task,
            index=index,
            state=episode.state,
            metadata=episode.metadata,
            tokens=reply.tokens,
            finish_reason=reply.finish_reason,
            seed=episode.turn_seed(index),
            chat=episode.chat,
        )
        answer = await _call_step(step, turn)
        if not isinstance(answer, Step):
            raise ComponentError(f"it returned {type(answer).__name__}, not a Step")
        episode.reward(answer.reward)
        for name, value in answer.metrics.items():
            episode.metric(name, value)
        if answer.observation is not None:
            episode.observe(answer.observation)
            observation = answer.observation
        if answer.done:
            return None
        if answer.observation is None and reply.finish_reason != "length":
            raise ComponentError(
                "it goes on without an observation after a finished turn: give one, or "
                "Step(done=True)"
            )


async def _call_step(step: Callable[[Any], Any], turn: Turn) -> Any:
    """A step that is no coroutine runs in a thread, so that a slow one doesn't stall the others.

    As many threads as episodes: a pool of a few would let slow tools wait for one another.
    """
    function = step if inspect.isroutine(step) else getattr(step, "instance", step)
    function = function if inspect.isroutine(function) else type(function).__call__
    if inspect.iscoroutinefunction(function):
        return await step(turn)
    result = await _threads.run(step, turn, timeout=math.inf)
    return await result if inspect.isawaitable(result) else result
