"""Collects the tokenised sequences of a data set, cut to length, into flat arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from rlx.core.config import DataConfig
from rlx.core.errors import UsageError
from rlx.core.offline.drafts import Encoded
from rlx.core.offline.examples import SAME, Example
from rlx.core.offline.needs import Needs
from rlx.core.offline.rows import RowBatch

NOTHING = "rows without a token to train"
NO_ROOM = "prompts that leave no room for the answer"
LONG_PROMPT = "prompts longer than data.max_prompt_tokens"
SAME_CUT = f"{SAME} once they are cut to length"


class RowBuilder:
    """Takes examples with their sequences; keeps, cuts, or leaves out and counts.

    Args:
        max_length: most tokens of a sequence.
        pad: token that a score is never read at, as loaders of the model have it.
    """

    def __init__(self, needs: Needs, data: DataConfig, *, max_length: int, pad: int | None) -> None:
        self._needs = needs
        self._data = data
        self._longest = max_length
        self._pad = pad
        self.dropped: Counter[str] = Counter()
        self.cut = 0
        """Sequences that were cut."""
        self.rewritten = 0
        """Answers of kept conversations that can't be trained."""
        self.empty = 0
        """Answers of kept conversations in which nothing is said."""
        self._numbers: list[int] = []
        self._tokens: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []
        self._turns: list[np.ndarray] = []
        self._margins: list[float] = []
        self._desirable: list[bool] = []
        self._labels: list[float] = []

    def __len__(self) -> int:
        """Rows kept so far."""
        return len(self._numbers)

    def add(self, examples: Sequence[tuple[int, Example]], sequences: Iterable[Encoded]) -> None:
        """Take rows by number, and the sequences of all their drafts in order."""
        following = iter(sequences)
        for number, example in examples:
            encoded = [next(following) for _ in example.drafts]
            whole = [self._read(one) for one in encoded]
            kept = [self._fitted(one) for one in whole]
            longest_prompt = max(one.prompt_length for one in encoded)
            if reason := self._refused(whole, kept, longest_prompt):
                self._drop(reason, number)
                continue
            self.cut += sum(
                len(one.tokens) < len(before.tokens)
                for before, one in zip(whole, kept, strict=True)
            )
            self.rewritten += example.rewritten
            self.empty += example.empty
            self._numbers.append(number)
            self._tokens += [np.array(one.tokens, np.int32) for one in kept]
            self._positions += [np.array(one.positions, np.int64) for one in kept]
            self._turns += [np.array(one.turns, np.int64) for one in kept]
            self._margins.append(example.margin)
            self._desirable.append(example.desirable)
            if example.labels:
                self._labels += [example.labels[step] for step in kept[0].turns]

    def finish(self, source: str) -> RowBatch:
        """The rows of the data set."""
        data = self._needs.data
        return RowBatch(
            tokens=np.concatenate(self._tokens),
            lengths=np.array([len(one) for one in self._tokens], np.int64),
            action_lengths=np.array([len(one) for one in self._positions], np.int64),
            action_positions=np.concatenate(self._positions),
            turn=np.concatenate(self._turns),
            number=np.array(self._numbers, np.int64),
            source=np.zeros(len(self), np.int64),
            sources=(source,),
            per_row=2 if data == "pairs" else 1,
            margin=np.array(self._margins) if data == "pairs" else None,
            desirable=np.array(self._desirable) if data == "unpaired" else None,
            labels=np.array(self._labels) if data == "steps" else None,
        )

    def _read(self, one: Encoded) -> Encoded:
        """Put the positions where the head reads."""
        tokens, positions, turns = one.tokens, one.positions, one.turns
        if self._needs.head == "score":
            kept = [place for place, token in enumerate(one.tokens) if token != self._pad]
            positions, turns = kept[-1:], [0] * len(kept[-1:])
        elif self._needs.data == "steps":
            ends = [i for i, turn in enumerate(turns) if turn not in turns[i + 1 : i + 2]]
            positions, turns = [positions[i] for i in ends], [turns[i] for i in ends]
        if self._needs.head != "score":
            tokens = tokens[: positions[-1] + 1] if positions else tokens  # the rest is for nothing
        return Encoded(tokens=tokens, positions=positions, turns=turns)

    def _fitted(self, one: Encoded) -> Encoded:
        """Cut to length: the end off, or the start where one number is read at the end."""
        beyond = len(one.tokens) - self._longest
        if beyond <= 0:
            return one
        offset = beyond if self._needs.head == "score" else 0
        pairs = [
            (place - offset, turn)
            for place, turn in zip(one.positions, one.turns, strict=True)
            if 0 < place - offset < self._longest
        ]
        return Encoded(
            tokens=one.tokens[offset : offset + self._longest],
            positions=[place for place, _ in pairs],
            turns=[turn for _, turn in pairs],
        )

    def _refused(
        self, whole: Sequence[Encoded], kept: Sequence[Encoded], longest_prompt: int
    ) -> str | None:
        most = self._data.max_prompt_tokens
        if not all(one.positions for one in whole):
            return NOTHING
        if most is not None and longest_prompt > most:
            return LONG_PROMPT
        if not all(one.positions for one in kept):
            return NO_ROOM
        if len(kept) == 2 and kept[0].tokens == kept[1].tokens:
            return SAME if whole[0].tokens == whole[1].tokens else SAME_CUT
        return None

    def _drop(self, reason: str, number: int) -> None:
        if reason in (NO_ROOM, LONG_PROMPT) and self._data.too_long == "error":
            raise UsageError(
                f"row {number} is one of {reason} (rows count from 0)",
                where="data.too_long: error",
                fix="data.too_long=skip, or a larger offline.max_length",
            )
        self.dropped[reason] += 1
