"""The learner of offline training: one rank that fits a model to an objective on rows of data."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from rlx.core.config import LearnerConfig
from rlx.core.engine.interfaces import FileMarks, UpdateResult
from rlx.core.engine.learner.distributed import gather, local_device
from rlx.core.engine.learner.gradients import FiniteCheck, TokenGradients, differentiate
from rlx.core.engine.learner.model import Loaded, load_policy
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.engine.learner.planning import Plan
from rlx.core.engine.learner.scored_model import load_scores
from rlx.core.engine.learner.training import (
    Answers,
    MicroObjective,
    Seat,
    SeatOptions,
    Trained,
    Training,
)
from rlx.core.engine.learner.weights_file import export_adapter, export_model
from rlx.core.objective import Denominators, MetricSums, Objective
from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.offline.needs import Needs, needs_of
from rlx.core.offline.rows import RowBatch
from rlx.core.offline.share import objective_share
from rlx.core.references import Bound, ComponentRef

_FIELDS = {"lm": "logprobs", "score": "scores", "token": "token_scores"}
"""By head: the field of the inputs that holds the model's answers."""


class ObjectiveLearner:
    """One rank of the data-parallel group that trains a model offline."""

    def __init__(
        self,
        *,
        model: str,
        settings: LearnerConfig,
        objective: ComponentRef,
        pad_token_id: int | None,
        total_updates: int,
        **seat: Unpack[SeatOptions],
    ) -> None:
        self._source = model
        self._objective_ref = objective
        self._pad = pad_token_id
        self._training = Training(settings, seat=Seat(**seat), total_updates=total_updates)

    def start(self) -> Mapping[str, Any]:
        self._objective: Bound = self._objective_ref.resolve()
        self._needs: Needs = needs_of(self._objective)
        return self._training.start(self._load)

    def _load(self, device: torch.device) -> Loaded[Any]:
        settings = self._training.settings
        if self._needs.head == "lm":
            return load_policy(self._source, settings, 1.0, device)
        return load_scores(
            self._source,
            settings,
            device,
            kind=self._needs.head,
            seed=self._training.seat.seed,
            pad_token_id=self._pad,
        )

    def _forward(self, micro: MicroBatch, chunks: int) -> Answers:
        """Log-probs [n], or numbers [n]."""
        if self._needs.head != "lm":
            return self._training.model.forward(micro)
        return self._training.model.forward(micro, chunks=chunks, entropy=False)

    def score(self, batch: RowBatch) -> np.ndarray:
        """Log-probs (or numbers) [N] of this rank's rows under the current weights."""
        return self._training.score(batch, self._forward)[0]

    def update(
        self, batch: RowBatch, *, step: int, others: RowBatch | None = None
    ) -> UpdateResult | None:
        """One optimizer step; None when given up before it.

        Args:
            others: the rows' prompts with other rows' completions, where a baseline is required.
        """
        baseline = self._baseline(others)
        objective = functools.partial(self._micro_objective, step=step, baseline=baseline)
        return self._result(self._training.update([batch], self._forward, objective))

    def _result(self, trained: Trained | None) -> UpdateResult | None:
        if trained is None:
            return None
        skipped = {"train/skipped_updates": float(trained.skipped)}
        return UpdateResult(
            metrics={
                **trained.metrics("train"),
                **(skipped if self._training.settings.nonfinite == "skip" else {}),
            },
            spans=trained.spans,
        )

    def measure(
        self, batch: RowBatch, *, step: int, prefix: str, others: RowBatch | None = None
    ) -> dict[str, float]:
        """The objective's loss and metrics on all ranks' rows, without training on them."""
        baseline = self._baseline(others)

        def measured(batch: RowBatch, plan: Plan) -> Callable[[MicroBatch, Answers], MetricSums]:
            def parts(micro: MicroBatch, answers: Answers) -> MetricSums:
                fields = self._fields(batch, micro, answers, baseline)
                x = ObjectiveInputs(**fields, step=step, training=False)
                share = self._share(x, plan.denominators, prefix)
                return MetricSums(share.sums, share.counts, share.maxima)

            return parts

        return self._training.measure(batch, self._forward, measured)

    def _micro_objective(
        self, batch: RowBatch, plan: Plan, *, step: int, baseline: Tensor | None
    ) -> MicroObjective:
        def gradients(micro: MicroBatch, answers: Answers) -> TokenGradients:
            fields = self._fields(batch, micro, answers, baseline)
            name = _FIELDS[self._needs.head]
            leaf = fields[name] = fields[name].detach().requires_grad_()
            check = FiniteCheck(batch, micro)
            check(leaf, "the model's answer")
            x = ObjectiveInputs(**fields, step=step)
            compute = functools.partial(self._share, x, plan.denominators, "train/")
            return differentiate(compute, (leaf,), check)

        return gradients

    def _share(self, x: ObjectiveInputs, denominators: Denominators, prefix: str) -> Objective:
        return objective_share(
            x,
            objective=self._objective,
            per=self._needs.per,
            denominators=denominators,
            prefix=prefix,
        )

    def _fields(
        self, batch: RowBatch, micro: MicroBatch, answers: Answers, baseline: Tensor | None
    ) -> dict[str, Any]:
        """The micro-batch's part of the rows, with the model's answers."""
        device = answers[0].device
        rows = batch.rollout_of[micro.sequences]

        def pick(values: np.ndarray | None, index: np.ndarray) -> Tensor | None:
            return None if values is None else torch.from_numpy(values[index]).to(device)

        fields: dict[str, Any] = {
            "lengths": torch.from_numpy(micro.action_lengths).to(device),
            "group": torch.from_numpy(rows).to(device),
            "turn": pick(batch.turn, micro.actions),
            "targets": torch.from_numpy(micro.targets).to(device),
            "labels": pick(batch.labels, micro.actions),
            "desirable": pick(batch.desirable, rows),
            "ref_logprobs": pick(batch.ref_logprobs, micro.actions),
            "kl_baseline": baseline,
            _FIELDS[self._needs.head]: answers[0],
        }
        if batch.per_row == 2:
            fields["side"] = torch.from_numpy(micro.sequences % 2 == 0).to(device)
            fields["margin"] = pick(batch.margin, np.unique(rows))
        return fields

    def _baseline(self, others: RowBatch | None) -> Tensor | None:
        """Mean over all ranks' rows of Σ_t (log π − log π_ref); all ranks call it."""
        if others is None:
            return None
        assert others.ref_logprobs is not None
        gaps = (self.score(others) - others.ref_logprobs).astype(np.float64)
        totals = gather((float(gaps.sum()), others.rollout_count))
        mean = sum(total for total, _ in totals) / max(sum(rows for _, rows in totals), 1)
        return torch.tensor(mean, dtype=torch.float32, device=local_device())

    def abort(self) -> None:
        self._training.abort()

    def hold(self, *, copy: bool, export: bool, facts: Mapping[str, float] | None = None) -> None:
        """`facts` go into the configuration of the model's folder."""
        self._note(facts)
        components = {"objective": self._objective.state_dict()}
        self._training.hold(components, copy=copy, export=self._source if export else None)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        return await self._training.write_held(state, model)

    def load(self, folder: str) -> None:
        self._objective.load_state_dict(self._training.load(folder)["objective"])

    def export(
        self, folder: str, facts: Mapping[str, float] | None = None, *, adapter: bool = False
    ) -> None:
        """Write a Hugging Face folder, or the adapter alone; `facts` go into its configuration."""
        self._note(facts)
        write = export_adapter if adapter else export_model
        write(self._training.model, self._source, folder, writer=self._training.seat.rank == 0)

    def _note(self, facts: Mapping[str, float] | None) -> None:
        for name, value in (facts or {}).items():
            setattr(self._training.model.module.model.config, name, value)

    def stop(self) -> None:
        self._training.stop()
