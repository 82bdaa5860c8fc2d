"""What an objective of offline training is given, and what it may give back.

Legend: B sequences, N trained tokens, K pairs of one micro-batch, V vocabulary. Trained tokens are
those that the data wants predicted or judged: an assistant's, a completion's, the markers of steps.
Prompts and padding are not among them, so an objective writes no mask. What the helpers of all
inputs call a group is here a row of the data: its sequences are never in two micro-batches.
"""

# ruff: noqa: RUF009 - the descriptors below are the fields' storage, shared on purpose

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from rlx.core.inputs import Ragged, _given, _requires
from rlx.core.ragged import Tensor


def _head(name: str) -> Tensor:
    return _given(f'Ask for it: @rlx.component(head="{name}").')


def _data(name: str) -> Tensor:
    return _given(f'Ask for it: @rlx.component(data="{name}").')


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ObjectiveInputs(Ragged):
    """One micro-batch of rows, as an objective sees it."""

    _per_token: ClassVar[str] = "turn"

    logprobs: Tensor = _head("lm")
    """[N] with gradient: log-prob of each trained token."""
    logits: Tensor = _head("logits")
    """[N, V] with gradient, of a piece of the trained tokens (whose sequences it may cut)."""
    scores: Tensor = _head("score")
    """[B] with gradient: one number for each sequence, read at its last token."""
    token_scores: Tensor = _head("token")
    """[N] with gradient: log-odds that a trained token is right, read at that token."""
    targets: Tensor = _given("These inputs carry no token ids.")
    """[N] int64, ids of the trained tokens."""
    ref_logprobs: Tensor = _requires("ref_logprobs")
    """[N], under the reference model."""
    teacher_logits: Tensor = _requires("teacher_logits")
    """[N, V], the teacher's for the same pieces as `logits`."""
    kl_baseline: Tensor = _requires("kl_baseline")
    """Scalar without gradient: mean over the optimizer step's rows of Σ_t (log π − log π_ref) of a
    prompt followed by another row's completion. Not clamped."""
    side: Tensor = _data("pairs")
    """[B] bool: whether a sequence is its pair's chosen one."""
    margin: Tensor = _data("pairs")
    """[K], by which the chosen one should win; 0 where the data says nothing."""
    desirable: Tensor = _data("unpaired")
    """[B] bool."""
    labels: Tensor = _data("steps")
    """[N] in 0 … 1: whether the step that ends at a trained token is right."""
    step: int = 0
    """Number of the training step."""
    training: bool = True
    """False while held-out data is evaluated: state must not change."""

    def __post_init__(self) -> None:
        Ragged.__post_init__(self)
        if self.has("side") and not self.has("margin"):
            self.__dict__["margin"] = torch.zeros(self.pair_count, device=self.lengths.device)

    @property
    def pair_count(self) -> int:
        """K."""
        return self._chosen.shape[0]

    def chosen(self, values: Tensor) -> Tensor:
        """Values of the chosen sequence of each pair: [B] -> [K]."""
        return values.index_select(0, self._chosen)

    def rejected(self, values: Tensor) -> Tensor:
        """Values of the rejected sequence of each pair, in the order of `chosen`: [B] -> [K]."""
        return values.index_select(0, self._rejected)

    @cached_property
    def _chosen(self) -> Tensor:
        return self._of_side(self.side)

    @cached_property
    def _rejected(self) -> Tensor:
        return self._of_side(~self.side)

    def _of_side(self, wanted: Tensor) -> Tensor:
        """[K] int64, sequences of one side in ascending order of their rows."""
        found = wanted.nonzero()[:, 0]
        return found[self.group[found].argsort(stable=True)]

    @property
    def log_ratio(self) -> Tensor:
        """[N] with gradient: logprobs − ref_logprobs."""
        return self.logprobs - self.ref_logprobs


@dataclass(frozen=True, slots=True)
class ObjectiveOutputs:
    """What an objective with metrics of its own returns; plain ones return the loss alone."""

    loss: Tensor
    """[N], [B] or [K], by the objective's `per`: the core reduces."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Logged as `train/<key>` and `eval/<source>/<key>`: averaged over all values ([N], [B], [K] or
    any selection of them) of the optimizer step; a scalar counts once for each row."""
