"""A per-token objective on whole distributions, computed in pieces of the trained tokens.

    values[i] = objective(logits of token i, teacher's logits of token i)

A piece's logits [m, V] exist while it is worked on, and once more while its gradient is computed;
between the passes there are hidden states only. So the memory is that of one piece, whatever the
number of tokens and the vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from rlx.core.engine.learner.model import PackedPolicy
from rlx.core.engine.learner.packing import Layout
from rlx.core.errors import RlxError
from rlx.core.ragged import at_least_float32

Values: TypeAlias = tuple[Tensor, Mapping[str, Tensor]]
PieceObjective: TypeAlias = Callable[[slice, Tensor, Tensor | None], Values]
"""Place of the piece on the axis [n], logits [m, V] with gradient, teacher's logits [m, V] without
→ values [m], and metrics [m] each."""


class LogitPieces(nn.Module):
    """Values [n] of an objective on the logits of a micro-batch's trained tokens."""

    def __init__(self, student: PackedPolicy) -> None:
        super().__init__()
        self.model = student.model
        self._student = [student]  # in a list, so that parameters have one name

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        source: Tensor,
        targets: Tensor,
        *,
        layout: Layout | None = None,
        chunks: int,
        objective: PieceObjective,
        teacher: PackedPolicy | None,
        errors: list[RlxError],
        metrics: list[Mapping[str, Tensor]],
    ) -> tuple[Tensor]:
        """
        Args:
            teacher: read at the same places; None: the objective has the student's logits alone.
            errors: what the objective raises is put here, because all ranks must go on calling the
                model until they agree to stop; the values are then 0.
            metrics: a piece's metrics are put here, in the order of the pieces.
        """
        student = self._student[0]
        hidden = student.hidden(tokens, positions, layout).flatten(0, 1).index_select(0, source)
        taught = _hidden(teacher, tokens, positions, source, layout)
        places = _pieces(hidden.shape[0], chunks)

        def piece(number: int, own: Tensor, other: Tensor | None) -> Tensor:
            logits = at_least_float32(student.head(own))
            if not logits.shape[0] or errors:
                return logits.sum(-1) * 0.0
            theirs = None if teacher is None or other is None else _logits(teacher, other)
            if theirs is not None:
                shared = min(logits.shape[1], theirs.shape[1])
                logits, theirs = logits[:, :shared], theirs[:, :shared]
            try:
                values, found = objective(places[number], logits, theirs)
            except RlxError as error:
                errors.append(error)
                return logits.sum(-1) * 0.0
            if len(metrics) == number:  # not when the piece is computed again backward
                metrics.append({name: metric.detach() for name, metric in found.items()})
            return values

        recompute = torch.is_grad_enabled() and chunks > 1
        values = []
        for number, place in enumerate(places):
            arguments = (number, hidden[place], None if taught is None else taught[place])
            if recompute:
                # Stopping early is done by an exception inside of users' code, which may catch it.
                with set_checkpoint_early_stop(False):
                    values.append(checkpoint(piece, *arguments, use_reentrant=False))
            else:
                values.append(piece(*arguments))
            if len(metrics) == number:
                metrics.append({})
        return (torch.cat(values),)


def _pieces(count: int, chunks: int) -> list[slice]:
    """`chunks` places of nearly equal length, some empty where there are fewer tokens."""
    bounds = [count * number // chunks for number in range(chunks + 1)]
    return [slice(*pair) for pair in itertools.pairwise(bounds)]


@torch.no_grad()
def _hidden(
    teacher: PackedPolicy | None,
    tokens: Tensor,
    positions: Tensor,
    source: Tensor,
    layout: Layout | None,
) -> Tensor | None:
    """The teacher's hidden states [n, H]."""
    if teacher is None or not source.shape[0]:
        return None
    return teacher.hidden(tokens, positions, layout).flatten(0, 1).index_select(0, source)


@torch.no_grad()
def _logits(teacher: PackedPolicy, hidden: Tensor) -> Tensor:
    return at_least_float32(teacher.head(hidden))
