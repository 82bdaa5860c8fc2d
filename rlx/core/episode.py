"""What an agent drives: engine calls, observations, rewards, and the exact account of tokens.

Token in, token out: what an engine call sampled is kept as ids and never tokenised again.
Observations are tokenised once, when the next engine call needs them, and are never action tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeAlias

import numpy as np

from rlx.core.conversation import Conversation, Observation, shortened
from rlx.core.errors import ComponentError, EngineError, did_you_mean
from rlx.core.rollouts import FinishReason, Message, Rollout, Span, Task

if TYPE_CHECKING:
    from rlx.core.engine.interfaces import Generation, Sampling

Generate: TypeAlias = Callable[[list[int], "Sampling", int], Awaitable["Generation"]]
"""`await generate(prompt tokens, sampling, seed)`: one engine call."""

_PER_CALL = ("max_new_tokens", "stop_token_ids")
_FIXED = ("temperature", "top_p", "top_k")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Where an episode ends whatever the agent wants, and what the agent's failure does."""

    context_length: int
    """Most tokens in all, the prompt included."""
    max_turns: int | None = None
    """Most engine calls."""
    max_tokens: int | None = None
    """Most tokens after the prompt, actions and observations together."""
    max_seconds: float | None = None
    """Most wall time, engine calls included."""
    step_timeout: float | None = None
    """Most seconds between two engine calls; an agent that takes longer has failed."""
    max_observation: int | None = None
    """Most characters of one observation."""
    cut_observations: bool = True
    """Leave out the middle of a longer observation; else the agent has failed."""
    failure: Literal["raise", "keep", "drop_group"] = "raise"
    """End the run, keep what there is of the episode, or leave its group out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one engine call sampled."""

    text: str
    """Special tokens skipped."""
    tokens: Sequence[int]
    """With the end-of-sequence token, if it was sampled."""
    finish_reason: FinishReason
    """`stop`, or `length` when the call's token limit cut it off."""


class EpisodeEnded(Exception):  # noqa: N818 - control flow, as StopIteration
    """A limit was reached: `Episode.generate` raises it, `run_agent` turns it into a finish reason.

    Agents may catch it to end in good order; another `generate` raises it again.
    """

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class _Turn:
    """One engine call's place in the token sequence."""

    start: int
    stop: int
    version: int
    finish_reason: FinishReason


class Episode:
    """One attempt at a task, as the free form drives it.

    Args:
        task: what to solve; its tokens are the first prompt.
        group_id: number of the group.
        index: of the rollout within its group.
        seed: of the rollout; turns draw theirs from it.
        generate: one engine call.
        tokenizer: decodes actions, encodes observations.
        sampling: the run's; temperature and truncation hold for every turn.
        limits: where the episode ends at the latest.
    """

    def __init__(
        self,
        *,
        task: Task,
        group_id: int,
        index: int,
        seed: int,
        generate: Generate,
        tokenizer: Any,
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self.task = task
        self.group_id = group_id
        self.index = index
        self.seed = seed
        self.limits = limits
        self.metadata: dict[str, Any] = dict(task.columns)
        """The task's columns. What an agent adds reaches rewards as `sample.task[...]`."""
        self.state: dict[str, Any] = {}
        """The agent's own; nothing reads it."""
        self.metrics: dict[str, float] = {}
        self.engine_error: Exception | None = None
        """What the engine call raised, so that it is not taken for the agent's mistake."""
        self.response: str | None = None
        """What rewards judge; None: all that came after the prompt."""
        self.observations_cut = 0
        """Observations that were longer than the limit."""
        self.agent_since: float | None = time.monotonic()
        """When it became the agent's turn; None while the engine works for it."""
        self._generate = generate
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._talk = Conversation(task, tokenizer)
        self._tokens: list[int] = [int(token) for token in task.tokens]
        self._prompt_length = len(self._tokens)
        self._turns: list[_Turn] = []
        self._rewards: list[float] = []
        self._logprobs: list[np.ndarray] = []
        self._ended: FinishReason | None = None
        self._running = False

    @property
    def chat(self) -> bool:
        """Whether the prompt went through the chat template."""
        return self._talk.chat

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, observations that are yet to be tokenised included."""
        return self._talk.messages

    @property
    def turns(self) -> int:
        """Engine calls so far."""
        return len(self._turns)

    @property
    def tokens_left(self) -> int:
        """Tokens that limits and context leave, observations not yet tokenised left aside; ≥ 0."""
        total = self.limits.context_length
        if self.limits.max_tokens is not None:
            total = min(total, self._prompt_length + self.limits.max_tokens)
        return max(0, total - len(self._tokens))

    def turn_seed(self, turn: int) -> int:
        """A 31-bit seed, a function of the episode's seed and the turn's number."""
        digest = hashlib.blake2b(f"{self.seed}/{turn}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    async def generate(self, **overrides: Any) -> Reply:
        """Let the policy go on from everything so far.

        Args:
            overrides: `max_new_tokens` or `stop_token_ids` for this call only.

        Raises:
            EpisodeEnded: turns, tokens or context are used up, or the engine aborted.
            ComponentError: a call within a call, or an override that would bend the log-probs.
        """
        if self._running:
            raise ComponentError("Episode.generate was called while another call was running")
        if self._ended is not None:
            raise EpisodeEnded(self._ended)
        sampling = self._with(overrides)
        if self.limits.max_turns is not None and self.turns >= self.limits.max_turns:
            self._end("max_turns")
        self._append_observations()
        budget = min(sampling.max_new_tokens, self.tokens_left)
        if budget < 1:
            self._end("max_tokens")
        generation = await self._engine_call(replace(sampling, max_new_tokens=budget))
        reply = self._append_action(generation)
        if generation.finish_reason == "length" and budget < sampling.max_new_tokens:
            self._ended = "max_tokens"
        if generation.finish_reason == "abort":
            self._end("abort")
        return reply

    def observe(self, observation: Observation) -> None:
        """Add what the environment says before the next `generate`.

        Args:
            observation: text, appended exactly as it is; or one or more chat messages, for tasks
                whose prompt went through the chat template. Tokenised once; never action tokens.

        Raises ComponentError for one that can't be shown, or that is too long and may not be cut.
        """
        if self.limits.max_observation is not None:
            cut = shortened(observation, self.limits.max_observation)
            if cut is not observation and not self.limits.cut_observations:
                raise ComponentError(
                    f"the observation is longer than {self.limits.max_observation:,} characters "
                    "(episode.max_observation)"
                )
            self.observations_cut += cut is not observation
            observation = cut
        self._talk.observe(observation)

    def end(self, reason: FinishReason) -> None:
        """No engine call from now on: `generate` raises EpisodeEnded."""
        self._ended = reason

    def reward(self, value: float) -> None:
        """Add to the reward of the last turn; raises ComponentError before the first."""
        if not self._turns:
            raise ComponentError("Episode.reward was called before the first generate")
        if not np.isfinite(value):
            raise ComponentError(f"Episode.reward was given {value}")
        self._rewards[-1] += float(value)

    def metric(self, name: str, value: float) -> None:
        """Log a number; the step's metric is the mean over the rollouts that have it."""
        self.metrics[name] = float(value)

    def rollout(
        self, finish_reason: FinishReason | None = None, *, error: str | None = None
    ) -> Rollout:
        """The rollout so far; `reward` is 0 and `parts` are empty, for the rewards to fill.

        Tokens after the last action are left out: nothing was sampled after them. `error` is what
        the agent failed of.
        """
        last = self._turns[-1].finish_reason if self._turns else "error"
        spans = [
            Span(
                start=turn.start,
                stop=turn.stop,
                version=turn.version,
                finish_reason=turn.finish_reason,
                reward=reward,
            )
            for turn, reward in zip(self._turns, self._rewards, strict=True)
        ]
        columns = self.task.columns
        changed = columns.keys() != self.metadata.keys() or any(
            self.metadata[name] is not value for name, value in columns.items()
        )
        text = self.response
        if text is None:
            response = self._tokens[self._prompt_length :]
            text = str(self._tokenizer.decode(response, skip_special_tokens=True))
        return Rollout(
            task=replace(self.task, columns=dict(self.metadata)) if changed else self.task,
            group_id=self.group_id,
            index=self.index,
            tokens=np.asarray(self._tokens, dtype=np.int32),
            spans=spans,
            logprobs=np.concatenate([np.zeros(0, dtype=np.float32), *self._logprobs]),
            text=text,
            finish_reason=finish_reason or self._ended or last,
            metrics=dict(self.metrics),
            messages=[*self.messages],
            error=error,
        )

    def _with(self, overrides: Mapping[str, Any]) -> Sampling:
        for name in overrides:
            if name in _FIXED:
                raise ComponentError(
                    f"Episode.generate can't change {name}: the learner scores every action token "
                    f"under the run's own (rollout.{name})"
                )
            if name not in _PER_CALL:
                hint = did_you_mean(name, _PER_CALL) or f"there are: {', '.join(_PER_CALL)}"
                raise ComponentError(f"Episode.generate has no option {name!r}; {hint}")
        return replace(self._sampling, **overrides)

    def _end(self, reason: FinishReason) -> NoReturn:
        self._ended = reason
        raise EpisodeEnded(reason)

    def _append_observations(self) -> None:
        tokens = self._talk.take_observations(self._tokens)
        if len(tokens) >= self.tokens_left:
            self._end("max_tokens")
        self._tokens += tokens

    async def _engine_call(self, sampling: Sampling) -> Generation:
        self._running = True
        self.agent_since = None
        try:
            return await self._generate([*self._tokens], sampling, self.turn_seed(self.turns))
        except Exception as error:
            self.engine_error = error
            raise
        finally:
            self._running = False
            self.agent_since = time.monotonic()

    def _append_action(self, generation: Generation) -> Reply:
        tokens = [int(token) for token in generation.tokens]
        if len(tokens) != len(generation.logprobs):
            raise EngineError(
                f"the engine gave {len(tokens)} tokens and {len(generation.logprobs)} log-probs"
            )
        if not tokens and generation.finish_reason != "abort":
            raise EngineError(f"the engine gave no tokens ({generation.finish_reason})")
        start = len(self._tokens)
        self._tokens += tokens
        text = str(self._tokenizer.decode(tokens, skip_special_tokens=True))
        if tokens:
            self._logprobs.append(np.asarray(generation.logprobs, dtype=np.float32))
            self._rewards.append(0.0)
            self._turns.append(
                _Turn(start, len(self._tokens), generation.version, generation.finish_reason)
            )
        self._talk.act(text)
        return Reply(text=text, tokens=tokens, finish_reason=generation.finish_reason)
