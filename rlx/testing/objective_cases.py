"""Generated micro-batches of rows, for the checks of objectives.

Legend: B sequences, N trained tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.offline.needs import Needs
from rlx.core.ragged import Tensor
from rlx.testing.offline import objective_inputs

LEAVES = {
    "lm": "logprobs",
    "logits": "logits",
    "score": "scores",
    "token": "token_scores",
}
"""By head: the field that holds the model's answers."""
_VOCABULARY = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The shape of a micro-batch of rows; its numbers follow from `seed`."""

    needs: Needs
    lengths: tuple[int, ...]
    """[B], trained tokens; the two sequences of a pair are neighbours."""
    seed: int = 0

    def __str__(self) -> str:
        return f"lengths={list(self.lengths)}, seed={self.seed}"

    @property
    def per_row(self) -> int:
        return 2 if self.needs.data == "pairs" else 1

    @property
    def rows(self) -> int:
        return len(self.lengths) // self.per_row

    def numbers(self, name: str, low: float, high: float, *shape: int) -> Tensor:
        """Return float64 numbers that belong to the case, the same at every call."""
        generator = torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)) % 997)
        drawn = torch.rand(*shape, generator=generator, dtype=torch.float64)
        return low + (high - low) * drawn

    def inputs(
        self,
        sequences: Sequence[int] | None = None,
        *,
        answers: Tensor | None = None,
        reference: Tensor | None = None,
        step: int = 0,
        training: bool = True,
    ) -> ObjectiveInputs:
        """Build a micro-batch of some sequences, all of them unless said otherwise.

        Args:
            answers: the model's, for all sequences.
            reference: log-probs of the reference model, for all sequences.
        """
        chosen = list(range(len(self.lengths)) if sequences is None else sequences)
        tokens = self.tokens_of(chosen)
        needs, N, B = self.needs, sum(self.lengths), len(self.lengths)
        answers = self.answers() if answers is None else answers
        leaf = answers[chosen] if needs.head == "score" else answers[tokens]
        fields: dict[str, Any] = {LEAVES[needs.head]: leaf.clone().requires_grad_()}
        if "ref_logprobs" in needs.requires:
            other = self.numbers("reference", -3.0, -0.5, N) if reference is None else reference
            fields["ref_logprobs"] = other[tokens]
        if "teacher_logits" in needs.requires:
            fields["teacher_logits"] = self.numbers("teacher", -2.0, 2.0, N, _VOCABULARY)[tokens]
        if "kl_baseline" in needs.requires:
            fields["kl_baseline"] = 0.0 if reference is not None else 0.3
        rows = [one // self.per_row for one in chosen]
        if needs.data == "pairs":
            fields["side"] = [one % 2 == 0 for one in chosen]
            margins = self.numbers("margin", 0.0, 1.0, self.rows)
            fields["margin"] = margins[sorted({*rows})]
        if needs.data == "unpaired":
            fields["desirable"] = [one % 2 == 0 for one in chosen]
        if needs.data == "steps":
            fields["labels"] = self.labels()[tokens]
        return objective_inputs(
            lengths=[self.lengths[one] for one in chosen] if B else [],
            group=rows,
            targets=(torch.arange(N) % _VOCABULARY)[tokens],
            step=step,
            training=training,
            **fields,
        )

    def answers(self) -> Tensor:
        """What the model says: [N], [B] or [N, V]."""
        head, N = self.needs.head, sum(self.lengths)
        if head == "score":
            return self.numbers("scores", -2.0, 2.0, len(self.lengths))
        if head == "token":
            return self.numbers("token_scores", -2.0, 2.0, N)
        if head == "logits":
            return self.numbers("logits", -2.0, 2.0, N, _VOCABULARY)
        return self.numbers("logprobs", -3.0, -0.5, N)

    def labels(self) -> Tensor:
        """[N], right and wrong steps in turn."""
        return (torch.arange(sum(self.lengths)) % 2 == 0).double()

    def tokens_of(self, sequences: Sequence[int]) -> Tensor:
        """[n] int64, trained tokens of some sequences, in their order."""
        places = torch.split(torch.arange(sum(self.lengths)), list(self.lengths))
        return torch.cat([places[one] for one in sequences]) if sequences else places[0][:0]

    def improved(self) -> Tensor:
        """The direction in which the model's answers are to go, shaped like them."""
        data, head = self.needs.data, self.needs.head
        lengths = torch.tensor(self.lengths)
        if head == "logits":
            teacher = self.inputs().get("teacher_logits")
            if teacher is not None:
                return torch.log_softmax(teacher, -1) - torch.log_softmax(self.answers(), -1)
            targets = torch.arange(sum(self.lengths)) % _VOCABULARY
            return torch.nn.functional.one_hot(targets, _VOCABULARY).double()
        if data == "steps":
            return 2 * self.labels() - 1
        signs = torch.ones(len(self.lengths), dtype=torch.float64)
        if data in ("pairs", "unpaired"):
            signs[1::2] = -1
        return signs if head == "score" else torch.repeat_interleave(signs, lengths)


def cases(needs: Needs, *, rows: tuple[int, int] = (1, 3)) -> SearchStrategy[Case]:
    """Micro-batches of some rows."""
    per_row = 2 if needs.data == "pairs" else 1
    longest = 1 if needs.head == "score" else 4

    def lengths(count: int) -> SearchStrategy[list[int]]:
        size = count * per_row
        return st.lists(st.integers(1, longest), min_size=size, max_size=size)

    drawn = st.tuples(st.integers(*rows).flatmap(lengths), st.integers(0, 20))
    return drawn.map(lambda pair: Case(needs=needs, lengths=tuple(pair[0]), seed=pair[1]))
