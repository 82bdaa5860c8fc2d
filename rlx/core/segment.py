"""One token sequence of an episode under way: a prompt, then actions and observations in turns."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.core.conversation import Conversation, Observation
from rlx.core.detokenizer import text_of
from rlx.core.errors import ComponentError, EngineError
from rlx.core.generation import Generation
from rlx.core.rollouts import FinishReason, Span


@dataclass(slots=True, kw_only=True)
class TurnRecord:
    """One engine call's place in its segment, and the reward that it has been given so far."""

    start: int
    stop: int
    version: int
    finish_reason: FinishReason
    versions: Sequence[tuple[int, int]]
    logprobs: np.ndarray
    text: str
    reward: float = 0.0

    def span(self, offset: int) -> Span:
        """The turn in a rollout whose segment begins at `offset`."""
        return Span(
            start=self.start + offset,
            stop=self.stop + offset,
            version=self.version,
            finish_reason=self.finish_reason,
            reward=self.reward,
            versions=self.versions,
        )


class Segment:
    """Tokens with the turns that sampled some of them, and the conversation that they are of."""

    def __init__(self, tokens: Sequence[int], talk: Conversation) -> None:
        self.tokens = array("i", tokens)
        """An array, as lists of numbers are work for the garbage collector."""
        self.prompt_length = len(self.tokens)
        self.turns: list[TurnRecord] = []
        self.talk = talk
        self.running = False
        """An engine call works on it."""
        self.reserved = 0
        """Most tokens that the call may add."""
        self.closed = False
        """Its conversation goes on in a later segment."""

    @property
    def kept(self) -> array[int]:
        """The tokens up to the last action: nothing was sampled after the others."""
        return self.tokens[: self.turns[-1].stop] if self.turns else self.tokens

    @property
    def added(self) -> int:
        """Tokens after the prompt."""
        return len(self.tokens) - self.prompt_length

    def act(self, generation: Generation, tokenizer: Any) -> tuple[list[int], str]:
        """Append what an engine call sampled; returns the tokens and their text.

        A call that was aborted may have sampled nothing, and is then no turn. Raises EngineError
        for tokens and log-probs that do not fit, and for no tokens otherwise.
        """
        sampled = np.asarray(generation.tokens)
        tokens: list[int] = sampled.tolist()
        if len(tokens) != len(generation.logprobs):
            raise EngineError(
                f"the engine gave {len(tokens)} tokens and {len(generation.logprobs)} log-probs"
            )
        if not tokens:
            if generation.finish_reason != "abort":
                raise EngineError(f"the engine gave no tokens ({generation.finish_reason})")
            return tokens, ""
        turn = TurnRecord(
            start=len(self.tokens),
            stop=len(self.tokens) + len(tokens),
            version=generation.version,
            finish_reason=generation.finish_reason,
            versions=generation.versions,
            logprobs=np.asarray(generation.logprobs, dtype=np.float32),
            text=text_of(sampled, tokenizer),
        )
        self.tokens.frombytes(sampled.astype(np.intc, copy=False).tobytes())
        self.turns.append(turn)
        return tokens, turn.text

    def rest_of_text(self, prompt: str, tokenizer: Any) -> str | None:
        """What a text adds; None where it does not go on from here, or where the tokens hold more
        than the text shows, as the end-of-sequence token after a finished answer."""
        if self.turns:
            tokens = self.tokens[self.turns[-1].start : self.turns[-1].stop]
            if str(tokenizer.decode(tokens, skip_special_tokens=False)) != self.turns[-1].text:
                return None
        return self.talk.rest_of_text(prompt)

    def response(self, tokenizer: Any) -> str:
        """What came after the prompt up to the last action, special tokens skipped."""
        if len(self.turns) == 1 and self.turns[0].stop - self.turns[0].start == self.added:
            return self.turns[0].text
        return text_of(self.kept[self.prompt_length :], tokenizer)


def going_on_from(
    segments: Sequence[Segment], rest_of: Callable[[Segment], Observation | None]
) -> Segment | None:
    """The latest segment that a prompt goes on from, with what it adds observed.

    Args:
        rest_of: what the prompt adds to a segment; None where it does not go on from it.
    """
    for segment in reversed(segments):
        if segment.running or segment.closed:
            continue
        rest = rest_of(segment)
        # no message more than the answer: nothing to answer to
        if rest is None or not (rest or isinstance(rest, str) or not segment.turns):
            continue
        if rest:
            segment.talk.observe(rest)
        return segment
    return None


def check_ids(prompt: Sequence[int], tokenizer: Any) -> None:
    """Raise ComponentError for ids that the tokenizer doesn't have: the engine would fail."""
    most = len(tokenizer) if hasattr(tokenizer, "__len__") else None
    for token in prompt:
        if token < 0 or (most is not None and token >= most):
            raise ComponentError(f"the prompt has the token {token}, which the model does not have")


def extending(
    segments: Sequence[Segment], prompt: list[int], text_of: Callable[[Sequence[int]], str]
) -> Segment | None:
    """The latest segment that token ids extend, with what they add."""
    for segment in reversed(segments):
        length = len(segment.tokens)
        if not (segment.running or segment.closed) and prompt[:length] == segment.tokens.tolist():
            if rest := prompt[length:]:
                segment.tokens.extend(rest)
                segment.talk.note(text_of(rest))
            return segment
    return None


def lay_out(segments: Sequence[Segment]) -> tuple[np.ndarray, list[Span], np.ndarray, list[int]]:
    """Segments one after the other: tokens [T], spans, log-probs [n] and where each begins."""
    kept = [np.array(segment.kept, dtype=np.int32) for segment in segments]
    offsets = [0, *itertools.accumulate(len(one) for one in kept[:-1])]
    turns = [(turn, at) for one, at in zip(segments, offsets, strict=True) for turn in one.turns]
    return (
        kept[0] if len(kept) == 1 else np.concatenate(kept),
        [turn.span(at) for turn, at in turns],
        np.concatenate([turn.logprobs for turn, _ in turns] or [np.zeros(0, np.float32)]),
        offsets,
    )
