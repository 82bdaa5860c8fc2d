"""What an episode's engine calls are asked, what they answer, and what ends them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from rlx.core.conversation import History
from rlx.core.generation import Generation, Sampling
from rlx.core.rollouts import FinishReason, Message

Generate: TypeAlias = Callable[[list[int], "Sampling", int], Awaitable["Generation"]]
"""`await generate(prompt tokens, sampling, seed)`: one engine call."""


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
    history: History = "split"
    """What is done where the chat template rewrites what it wrote before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What one engine call sampled."""

    text: str
    """Special tokens skipped."""
    tokens: Sequence[int]
    """With the end-of-sequence token, if it was sampled."""
    finish_reason: FinishReason
    """`stop`, or `length` when the call's token limit cut it off."""
    logprobs: Sequence[float] = ()
    """Of the tokens, of the distribution that they were sampled from."""
    message: Message = field(default_factory=dict)
    """The answer as it stands in the conversation."""
    prompt_length: int = 0
    """Tokens that the engine was given."""
    stop: str | None = None
    """The stop string that the text ended with, which it no longer has."""


class EpisodeEnded(Exception):  # noqa: N818 - control flow, as StopIteration
    """A limit was reached: `Episode.generate` raises it, `run_agent` turns it into a finish reason.

    Agents may catch it to end in good order; another `generate` raises it again.
    """

    def __init__(self, reason: FinishReason) -> None:
        super().__init__(reason)
        self.reason = reason


class ContextExceeded(EpisodeEnded):
    """The prompt that an agent made does not fit the context. A shorter one may: the episode has
    not ended yet, if the agent catches this."""

    def __init__(self, length: int, context: int) -> None:
        super().__init__("max_tokens")
        self.length = length
        """Tokens, or a lower bound of them."""
        self.context = context

    def __str__(self) -> str:
        return f"the prompt has {self.length:,} tokens or more, the context is {self.context:,}"
