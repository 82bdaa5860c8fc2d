"""The learner of objectives on whole distributions: distillation, with its teacher beside it.

The teacher is a scorer in the learner's process: forward only, on the same micro-batches, so that
what crosses from one model to the other is a piece of logits and never leaves the process.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.core.engine.interfaces import UpdateResult
from rlx.core.engine.learner.gradients import FiniteCheck, TokenGradients, differentiate
from rlx.core.engine.learner.logit_pieces import LogitPieces, Values
from rlx.core.engine.learner.model import Loaded, PackedPolicy, load_policy
from rlx.core.engine.learner.objective_learner import ObjectiveLearner
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.engine.learner.planning import Plan
from rlx.core.engine.learner.training import Answers, MicroObjective, Training
from rlx.core.errors import ComponentError, EngineError, RlxError
from rlx.core.objective import Denominators, MetricSums, Objective
from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
from rlx.core.offline.rows import RowBatch
from rlx.core.offline.share import objective_share, objective_values
from rlx.core.references import Bound

PIECE = 128
"""Trained tokens whose logits exist at a time, where `learner.logprob_chunk` does not say."""


class LogitLearner(ObjectiveLearner):
    """One rank that fits a model to an objective with `head="logits"`.

    Args:
        teacher: folder of the model that gives `teacher_logits`; None: there is none.
        teacher_dtype: of its weights; `auto` is the checkpoint's.
        more: arguments of `ObjectiveLearner`.
    """

    def __init__(self, *, teacher: str | None, teacher_dtype: str = "auto", **more: Any) -> None:
        settings = more["settings"]
        chunk = PIECE if settings.logprob_chunk in ("auto", 0) else settings.logprob_chunk
        more["settings"] = settings.model_copy(update={"logprob_chunk": chunk})
        super().__init__(**more)
        self._teacher_source = teacher
        self._teacher_dtype = teacher_dtype
        self._teacher: PackedPolicy | None = None

    def _load(self, device: torch.device) -> Loaded[LogitPieces]:
        settings = self._training.settings
        student = load_policy(self._source, settings, 1.0, device)
        packing = student.packing
        if self._teacher_source is not None:
            still = settings.forward_only().model_copy(update={"dtype": self._teacher_dtype})
            loaded = load_policy(self._teacher_source, still, 1.0, device)
            self._teacher = loaded.module.requires_grad_(False)
            packing = packing.both(loaded.packing)
        pieces = LogitPieces(student.module)
        return Loaded(module=pieces, dtype=student.dtype, packing=packing)

    def score(self, batch: RowBatch) -> np.ndarray:
        raise EngineError("a learner of whole distributions has no score of single tokens")

    def update(
        self, batch: RowBatch, *, step: int, others: RowBatch | None = None
    ) -> UpdateResult | None:
        """One optimizer step; None when given up before it."""
        passes = _Passes(self._objective, self._training, self._teacher, batch, step=step)
        return self._result(self._training.update([batch], passes.forward, passes.gradients_of))

    def measure(
        self, batch: RowBatch, *, step: int, prefix: str, others: RowBatch | None = None
    ) -> dict[str, float]:
        """The objective's loss and metrics on all ranks' rows, without training on them."""
        passes = _Passes(
            self._objective, self._training, self._teacher, batch, step=step, prefix=prefix
        )
        return self._training.measure(batch, passes.forward, passes.parts_of)


class _Passes:
    """Passes over one batch: the objective is asked in the forward pass, piece by piece, and its
    values [n] are the model's answers; their reduction is as for every objective."""

    def __init__(
        self,
        objective: Bound,
        training: Training,
        teacher: PackedPolicy | None,
        batch: RowBatch,
        *,
        step: int,
        prefix: str = "",
    ) -> None:
        """`prefix`: of the metrics' names where the batch is measured; empty: it is trained on."""
        self._objective = objective
        self._training = training
        self._teacher = teacher
        self._batch = batch
        self._step = step
        self._prefix = prefix
        self._errors: list[RlxError] = []
        self._metrics: list[Mapping[str, Tensor]] = []

    def forward(self, micro: MicroBatch, chunks: int) -> Answers:
        """The objective's values [n]."""
        self._errors, self._metrics = [], []
        return self._training.model.forward(
            micro,
            chunks=chunks,
            objective=functools.partial(self._values, micro),
            teacher=self._teacher,
            errors=self._errors,
            metrics=self._metrics,
        )

    def gradients_of(self, batch: RowBatch, plan: Plan) -> MicroObjective:
        def gradients(micro: MicroBatch, answers: Answers) -> TokenGradients:
            self._raise_errors()
            leaf = answers[0].detach().requires_grad_()
            check = FiniteCheck(batch, micro)
            compute = functools.partial(self._share, micro, leaf, plan.denominators, "train/")
            return differentiate(compute, (leaf,), check)

        return gradients

    def parts_of(self, batch: RowBatch, plan: Plan) -> Callable[[MicroBatch, Answers], MetricSums]:
        def parts(micro: MicroBatch, answers: Answers) -> MetricSums:
            self._raise_errors()
            share = self._share(micro, answers[0], plan.denominators, self._prefix)
            return MetricSums(share.sums, share.counts, share.maxima)

        return parts

    def _raise_errors(self) -> None:
        """What the objective raised in the forward pass, where all ranks learn of it."""
        if self._errors:
            raise self._errors[0]

    def _values(
        self, micro: MicroBatch, place: slice, logits: Tensor, teacher: Tensor | None
    ) -> Values:
        """What the objective says of a piece."""
        x = ObjectiveInputs(
            **self._fields(micro, place, logits.device),
            **({} if teacher is None else {"teacher_logits": teacher}),
            logits=logits,
            step=self._step,
            training=not self._prefix,
        )
        try:
            found = objective_values(x, self._objective, "token")
        except RlxError:
            raise
        except Exception as error:
            name = self._objective.name
            raise ComponentError(
                f"the objective '{name}' failed: {type(error).__name__}: {error}"
            ) from error
        metrics = {
            name: metric if metric.ndim else metric.expand(x.token_count)
            for name, metric in found.metrics.items()
        }
        return found.loss, metrics

    def _fields(self, micro: MicroBatch, place: slice, device: torch.device) -> dict[str, Any]:
        """What the batch says of a piece, which may cut its first and last sequence."""
        owner = np.repeat(np.arange(len(micro.sequences)), micro.action_lengths)[place]
        inside, lengths = np.unique(owner, return_counts=True)
        rows = self._batch.rollout_of[micro.sequences[inside]]
        actions = micro.actions[place]
        desirable, labels = self._batch.desirable, self._batch.labels
        arrays = {
            "lengths": lengths,
            "group": rows,
            "turn": self._batch.turn[actions],
            "targets": micro.targets[place],
            "desirable": None if desirable is None else desirable[rows],
            "labels": None if labels is None else labels[actions],
        }
        return {
            name: torch.from_numpy(values).to(device)
            for name, values in arrays.items()
            if values is not None
        }

    def _share(
        self, micro: MicroBatch, values: Tensor, denominators: Denominators, prefix: str
    ) -> Objective:
        names = dict.fromkeys(name for metrics in self._metrics for name in metrics)
        metrics = {
            name: torch.cat([found[name] for found in self._metrics if name in found])
            for name in names
        }
        whole = slice(0, micro.action_count)
        x = ObjectiveInputs(**self._fields(micro, whole, values.device), logprobs=values)
        return objective_share(
            x,
            objective=lambda x: ObjectiveOutputs(x.logprobs, metrics),
            per="token",
            denominators=denominators,
            prefix=prefix,
        )
