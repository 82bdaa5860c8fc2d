"""Build the inputs of objectives from plain lists or tensors.

Lists of numbers become float64 tensors, tensors keep their dtype: float64 in, float64 out.
Legend: B sequences, N trained tokens, K pairs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlx.core.errors import UsageError
from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.ragged import Tensor
from rlx.testing.inputs import Numbers, _check, _floats, _integers

_PER_TOKEN = ("logprobs", "logits", "token_scores", "ref_logprobs", "teacher_logits", "labels")
_PER_SEQUENCE = ("scores", "side", "desirable", "group", "lengths")


def objective_inputs(
    *,
    lengths: Numbers | None = None,
    group: Numbers | None = None,
    turn: Numbers | None = None,
    targets: Numbers | None = None,
    side: Sequence[bool] | Tensor | None = None,
    desirable: Sequence[bool] | Tensor | None = None,
    kl_baseline: float | Tensor | None = None,
    step: int = 0,
    training: bool = True,
    **numbers: Numbers,
) -> ObjectiveInputs:
    """A micro-batch for an objective.

    Args:
        lengths: [B] trained tokens per sequence; unset: one each.
        group: [B], the row of each sequence; unset: two neighbours each with `side`, else one each.
        turn: [N]; unset: a single answer.
        targets: [N], token ids.
        side: [B], whether a sequence is its pair's chosen one.
        desirable: [B].
        kl_baseline: a number.
        step: of training.
        training: false for held-out data.
        numbers: what the model says (`logprobs` [N], `scores` [B], `token_scores` [N] or `logits`
            [N, V]) and what goes with it (`ref_logprobs`, `teacher_logits`, `labels`, `margin`).

    Raises:
        UsageError: a tensor's length does not fit `lengths`.

    >>> x = objective_inputs(scores=[1.0, 0.0, 2.0, 3.0], side=[True, False, True, False])
    >>> x.chosen(x.scores).tolist(), x.rejected(x.scores).tolist()
    ([1.0, 2.0], [0.0, 3.0])
    """
    given = {name: _floats(values) for name, values in numbers.items()}
    if lengths is None:
        counts = [len(given[n]) for n in (*_PER_TOKEN, "scores") if n in given]
        lengths = torch.ones(counts[0] if counts else 0, dtype=torch.int64)
    lengths = _integers(lengths)
    B, N = lengths.shape[0], int(lengths.sum())
    if group is None:
        group = torch.arange(B) // (2 if side is not None else 1)
    optional: dict[str, Any] = dict(given)
    for name, flags in (("side", side), ("desirable", desirable)):
        if flags is not None:
            optional[name] = torch.as_tensor(flags, dtype=torch.bool)
    if kl_baseline is not None:
        given_one = isinstance(kl_baseline, Tensor)
        number = kl_baseline if given_one else torch.tensor(kl_baseline, dtype=torch.float64)
        optional["kl_baseline"] = number
    if targets is not None:
        optional["targets"] = _integers(targets)
    x = ObjectiveInputs(
        lengths=lengths,
        group=_integers(group),
        turn=torch.zeros(N, dtype=torch.int64) if turn is None else _integers(turn),
        step=step,
        training=training,
        **optional,
    )
    _check(x, B, _PER_SEQUENCE, "sequences")
    _check(x, N, ("logprobs", "token_scores", "ref_logprobs", "labels", "turn"), "trained tokens")
    for name in ("logits", "teacher_logits"):
        if x.has(name) and x.get(name).shape[0] != N:
            raise UsageError(f"{name} has {x.get(name).shape[0]} rows for {N} trained tokens")
    if x.has("side"):
        _check(x, x.pair_count, ("margin",), "pairs")
        if x.pair_count * 2 != B:
            raise UsageError(
                f"{x.pair_count} of {B} sequences are chosen ones",
                fix="each pair has a chosen and a rejected one",
            )
    return x
