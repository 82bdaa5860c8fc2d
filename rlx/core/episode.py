"""What an agent drives: engine calls, observations, rewards, and the exact account of tokens.

Token in, token out: what an engine call sampled is kept as ids and never tokenised again.
Observations are tokenised once, when the next engine call needs them, and are never action tokens.
Where a prompt does not extend what was there, a new segment of the rollout begins (`Rollout`).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.core.conversation import Conversation, Observation, shortened
from rlx.core.detokenizer import text_of
from rlx.core.errors import ComponentError
from rlx.core.generation import Generation, Sampling
from rlx.core.messages import encodable, for_template
from rlx.core.overrides import with_overrides
from rlx.core.rollouts import FinishReason, Message, Rollout, Task
from rlx.core.room import Room
from rlx.core.segment import (
    Segment,
    TurnRecord,
    check_ids,
    extending,
    going_on_from,
    lay_out,
)
from rlx.core.stalls import NotTheAgents
from rlx.core.stops import before_stop, cut_at_stop
from rlx.core.turns import ContextExceeded as ContextExceeded
from rlx.core.turns import EpisodeEnded as EpisodeEnded
from rlx.core.turns import Generate as Generate
from rlx.core.turns import Limits as Limits
from rlx.core.turns import Reply as Reply


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
        talk = Conversation(task.prompt, tokenizer, history=limits.history)
        self._segments = [Segment(task.tokens, talk)]
        self._segment = self._segments[0]
        """The one that `generate` goes on with."""
        self._last: TurnRecord | None = None
        """Of the latest engine call."""
        self._room = Room(limits, self._segments)
        self._running = 0
        """Engine calls under way."""

    @property
    def chat(self) -> bool:
        """Whether the prompt went through the chat template."""
        return self._segment.talk.chat

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, observations that are yet to be tokenised included."""
        return self._segment.talk.messages

    @property
    def sampling(self) -> Sampling:
        """The run's; at temperature 0 (a greedy evaluation) the rest of it does not matter."""
        return self._sampling

    @property
    def tokenizer(self) -> Any:
        """The model's, as transformers has it."""
        return self._tokenizer

    @property
    def ended(self) -> FinishReason | None:
        """The limit that was reached; None while engine calls are possible."""
        return self._room.ended

    @property
    def overflowed(self) -> bool:
        """Whether the latest prompt of the agent's own making did not fit the context."""
        return self._room.overflowed

    @property
    def turns(self) -> int:
        """Engine calls so far."""
        return sum(len(segment.turns) for segment in self._segments)

    @property
    def tokens_left(self) -> int:
        """Tokens that limits and context leave, observations not yet tokenised left aside; ≥ 0."""
        return self._room.left(self._segment)

    def turn_seed(self, turn: int) -> int:
        """A 31-bit seed, a function of the episode's seed and the turn's number."""
        digest = hashlib.blake2b(f"{self.seed}/{turn}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1

    async def generate(self, **overrides: Any) -> Reply:
        """Let the policy go on from everything so far.

        Args:
            overrides: `max_new_tokens`, `stop_token_ids` or `stop` (texts, of which the reply
                does not show the one that it ended with) for this call only.

        Raises:
            EpisodeEnded: turns, tokens or context are used up, or the engine aborted.
            ComponentError: a call within a call, or an override that would bend the log-probs.
        """
        if self._segment.running:
            raise ComponentError("Episode.generate was called while another call was running")
        return await self._go_on(self._segment, overrides)

    async def answer(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        show: Callable[[str], Message] | None = None,
        **overrides: Any,
    ) -> Reply:
        """Let the policy answer a whole conversation, as chat APIs are asked.

        Where the messages go on from an earlier answer of this episode, what they add is appended
        to its tokens; anything else begins a new segment. Calls may run side by side.

        Args:
            messages: from the first one on, with the earlier answers in their place; in the forms
                that chat APIs know (parts of text, arguments of tools as JSON).
            tools: JSON schemas of functions, for the chat template.
            show: the message that the agent makes of the model's text, for example with its tool
                calls taken out; what it sends back later is compared with that.
            overrides: as of `generate`.

        Raises as `generate`; ContextExceeded for messages that do not fit the context, after which
        the episode can go on with shorter ones; ComponentError for a model without chat template,
        and for messages that are no text.
        """
        try:
            messages = [for_template(message) for message in messages]
        except ValueError as error:
            raise ComponentError(str(error)) from error
        self._room.check_size(sum(len(message["content"]) for message in messages))
        segment = going_on_from(self._segments, lambda one: one.talk.rest_of(messages, tools))
        if segment is None:
            history = self.limits.history
            talk = Conversation([*messages], self._tokenizer, tools=tools, history=history)
            segment = self._begin(talk.prompt_tokens(), talk)
        return await self._go_on(segment, overrides, show, asked=True)

    async def complete(self, prompt: str | Sequence[int], **overrides: Any) -> Reply:
        """Let the policy go on from a text, or from token ids, that need not be the task's.

        A prompt that begins with an earlier one and its answer extends it; anything else begins a
        new segment. Raises as `answer`.
        """
        if isinstance(prompt, str):
            self._room.check_size(len(prompt))
            segment = going_on_from(
                self._segments, lambda one: one.rest_of_text(prompt, self._tokenizer)
            )
            tokens = self._tokenizer(encodable(prompt))["input_ids"] if segment is None else ()
            text = prompt
        else:
            check_ids(prompt, self._tokenizer)
            segment = extending(self._segments, [*prompt], self._text)
            tokens = prompt
            text = self._text(prompt)
        if segment is None:
            segment = self._begin(tokens, Conversation(text, self._tokenizer))
        return await self._go_on(segment, overrides, asked=True)

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
        self._segment.talk.observe(observation)

    def end(self, reason: FinishReason) -> None:
        """No engine call from now on: `generate` raises EpisodeEnded."""
        self._room.ended = reason

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The agent waits for what episodes share: that doesn't count as its own time."""
        self.agent_since = None
        try:
            yield
        finally:
            self.agent_since = None if self._running else time.monotonic()

    def reward(self, value: float) -> None:
        """Add to the reward of the last turn; raises ComponentError before the first."""
        if self._last is None:
            raise ComponentError("Episode.reward was called before the first generate")
        if not np.isfinite(value):
            raise ComponentError(f"Episode.reward was given {value}")
        self._last.reward += float(value)

    def metric(self, name: str, value: float) -> None:
        """Log a number; the step's metric is the mean over the rollouts that have it.

        Raises ComponentError for a name that is no text.
        """
        if not isinstance(name, str):
            raise ComponentError(f"Episode.metric was given the name {name!r}, which is no text")
        self.metrics[name] = float(value)

    def rollout(
        self, finish_reason: FinishReason | None = None, *, error: str | None = None
    ) -> Rollout:
        """The rollout so far; `reward` is 0 and `parts` are empty, for the rewards to fill.

        Tokens after the last action are left out: nothing was sampled after them. `error` is what
        the agent failed of.
        """
        last = "error" if self._last is None else self._last.finish_reason
        segments = [one for one in self._segments if one.turns] or self._segments[:1]
        tokens, spans, logprobs, starts = lay_out(segments)
        columns = self.task.columns
        changed = columns.keys() != self.metadata.keys() or any(
            self.metadata[name] is not value for name, value in columns.items()
        )
        text = self.response
        if text is None:
            text = "\n".join(segment.response(self._tokenizer) for segment in segments)
        return Rollout(
            task=replace(self.task, columns=dict(self.metadata)) if changed else self.task,
            group_id=self.group_id,
            index=self.index,
            tokens=tokens,
            spans=spans,
            logprobs=logprobs,
            text=text,
            finish_reason=finish_reason or self._room.ended or last,
            metrics=dict(self.metrics),
            messages=[*self.messages],
            error=error,
            segments=starts,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        return text_of(tokens, self._tokenizer)

    def _begin(self, prompt: Sequence[int], talk: Conversation) -> Segment:
        segment = Segment(prompt, talk)
        self._segments.append(segment)
        return segment

    async def _go_on(
        self,
        segment: Segment,
        overrides: Mapping[str, Any],
        show: Callable[[str], Message] | None = None,
        *,
        asked: bool = False,
    ) -> Reply:
        """One engine call at the end of `segment`, or of the one that takes its place; `asked` by
        an agent that makes its prompts itself."""
        self._room.check(self.turns + self._running)
        sampling, stop = with_overrides(self._sampling, overrides, self._tokenizer)
        self._segment = segment = self._with_observations(segment, asked=asked)
        self._room.check_tokens(segment, 0, asked=asked)
        self._room.overflowed = False
        budget = min(sampling.max_new_tokens, self._room.left(segment))
        prompt_length = len(segment.tokens)
        if budget < sampling.max_new_tokens:
            call = replace(sampling, max_new_tokens=budget)
        else:
            call = sampling
        generation = await self._engine_call(segment, call)
        if stop:
            generation = cut_at_stop(generation, stop, self._tokenizer)
        tokens, text = segment.act(generation, self._tokenizer)
        self._last = segment.turns[-1] if tokens else self._last
        shown, word = before_stop(text, stop)
        message = {"role": "assistant", "content": shown} if show is None else show(shown)
        segment.talk.act(text, message)
        if generation.finish_reason == "length" and budget < sampling.max_new_tokens:
            self._room.cut_off(segment, asked=asked)
        if generation.finish_reason == "abort":
            self._room.end("abort")
        return Reply(
            text=shown,
            tokens=tokens,
            finish_reason=generation.finish_reason,
            logprobs=np.asarray(generation.logprobs, np.float64).tolist(),
            message=message,
            prompt_length=prompt_length,
            stop=word,
        )

    def _with_observations(self, segment: Segment, *, asked: bool) -> Segment:
        """The segment with the waiting observations, or a new one where history was rewritten."""
        more = segment.talk.take_observations(segment.tokens)
        if more.fresh:
            segment.closed = True
            return self._begin(more.tokens, segment.talk)
        if more.tokens:
            self._room.check_tokens(segment, len(more.tokens), asked=asked)
        segment.tokens.extend(more.tokens)
        return segment

    async def _engine_call(self, segment: Segment, sampling: Sampling) -> Generation:
        seed = self.turn_seed(self.turns + self._running)
        self._running += 1
        segment.running, segment.reserved = True, sampling.max_new_tokens
        self.agent_since = None
        try:
            with NotTheAgents():
                return await self._generate([*segment.tokens], sampling, seed)
        except Exception as error:
            self.engine_error = error
            raise
        finally:
            segment.running, segment.reserved = False, 0
            self._running -= 1
            if not self._running:
                self.agent_since = time.monotonic()
