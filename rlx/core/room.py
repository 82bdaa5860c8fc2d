"""What the limits of an episode leave it: turns, tokens, context; and what ended it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from rlx.core.rollouts import FinishReason
from rlx.core.segment import Segment
from rlx.core.turns import ContextExceeded, EpisodeEnded, Limits

_MOST_CHARACTERS = 64
"""Of a token, as an upper bound for texts."""


class Room:
    """Looks at all segments of an episode, those that are begun later included.

    A prompt is `asked` where the agent makes its prompts itself: it may ask with a shorter one next
    time, so a full context doesn't end its episode.
    """

    def __init__(self, limits: Limits, segments: Sequence[Segment]) -> None:
        self._limits = limits
        self._segments = segments
        self.ended: FinishReason | None = None
        """The limit that was reached; None while engine calls are possible."""
        self.overflowed = False
        """The latest prompt of the agent's own making did not fit the context."""

    def left(self, segment: Segment) -> int:
        """Tokens that `segment` can still take; ≥ 0."""
        left = self._limits.context_length - len(segment.tokens)
        if self._limits.max_tokens is not None:
            taken = sum(one.added + one.reserved for one in self._segments)
            left = min(left, self._limits.max_tokens - taken)
        return max(0, left)

    def end(self, reason: FinishReason) -> NoReturn:
        """No engine call from now on."""
        self.ended = reason
        raise EpisodeEnded(reason)

    def check(self, calls: int) -> None:
        """Raise EpisodeEnded where there is no other call; `calls`: those so far."""
        if self.ended is not None:
            raise EpisodeEnded(self.ended)
        if self._limits.max_turns is not None and calls >= self._limits.max_turns:
            self.end("max_turns")

    def check_size(self, characters: int) -> None:
        """Raise ContextExceeded for a prompt that can't fit, before it is tokenised."""
        if characters > _MOST_CHARACTERS * self._limits.context_length:
            self._overflow(characters // _MOST_CHARACTERS)

    def check_tokens(self, segment: Segment, more: int, *, asked: bool) -> None:
        """Raise EpisodeEnded or ContextExceeded where `more` tokens leave none for an answer."""
        if self.left(segment) > more:
            return
        length = len(segment.tokens) + more
        if not asked or length < self._limits.context_length:
            self.end("max_tokens")
        segment.closed = True
        self._overflow(length)

    def cut_off(self, segment: Segment, *, asked: bool) -> None:
        """A limit cut the answer off, and not the call's own: it was the last one, but for an agent
        that may ask with a shorter prompt."""
        if asked and len(segment.tokens) >= self._limits.context_length:
            segment.closed = True
        else:
            self.ended = "max_tokens"

    def _overflow(self, length: int) -> NoReturn:
        self.overflowed = True
        raise ContextExceeded(length, self._limits.context_length)
