"""The value learner: one rank that fits the critic to the returns of the estimator."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from rlx.core.config import LearnerConfig
from rlx.core.engine.interfaces import FileMarks, UpdateResult
from rlx.core.engine.learner.gradients import (
    FiniteCheck,
    TokenGradients,
    differentiate,
    micro_fields,
)
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.engine.learner.planning import Plan
from rlx.core.engine.learner.training import Answers, MicroObjective, Seat, SeatOptions, Training
from rlx.core.engine.learner.value_model import load_critic
from rlx.core.rollouts import TrainBatch
from rlx.core.value_loss import ValueInputs, ValueSettings, value_objective


class ValueLearner:
    """One rank of the data-parallel group that trains the critic."""

    def __init__(
        self,
        *,
        model: str,
        settings: LearnerConfig,
        objective: ValueSettings,
        total_updates: int,
        **seat: Unpack[SeatOptions],
    ) -> None:
        self._source = model
        self._objective = objective
        self._training = Training(settings, seat=Seat(**seat), total_updates=total_updates)

    def start(self) -> Mapping[str, Any]:
        settings = self._training.settings
        return self._training.start(lambda device: load_critic(self._source, settings, device))

    def _forward(self, micro: MicroBatch, chunks: int) -> Answers:
        """Values [n]; there is no vocabulary projection to do in `chunks`."""
        return self._training.model.forward(micro)

    def score(self, batch: TrainBatch) -> np.ndarray:
        """Values [N] of this rank's batch under the current weights."""
        return self._training.score(batch, self._forward)[0]

    def update(self, batches: Sequence[TrainBatch], *, step: int) -> UpdateResult | None:
        """One optimizer step for each batch, which has `values` and `returns`."""
        trained = self._training.update(batches, self._forward, self._micro_objective)
        if trained is None:
            return None
        skipped = {"critic/skipped_updates": float(trained.skipped)}
        return UpdateResult(
            metrics={
                **trained.metrics("critic"),
                **(skipped if self._training.settings.nonfinite == "skip" else {}),
            }
        )

    def _micro_objective(self, batch: TrainBatch, plan: Plan) -> MicroObjective:
        def gradients(micro: MicroBatch, answers: Answers) -> TokenGradients:
            (values,) = answers
            fields = micro_fields(batch, micro, values.device, "values", "returns")
            leaf = values.detach().requires_grad_()
            old = fields.pop("values")
            inputs = ValueInputs(**fields, old_values=old, values=leaf)
            check = FiniteCheck(batch, micro)
            check(leaf, "the critic's value")
            check(inputs.returns, "the return")
            compute = functools.partial(
                value_objective,
                inputs,
                settings=self._objective,
                denominators=plan.denominators,
            )
            return differentiate(compute, (leaf,), check)

        return gradients

    def abort(self) -> None:
        self._training.abort()

    def hold(self, *, copy: bool, export: bool) -> None:
        """A critic has no use outside of the run: nothing is exported."""
        self._training.hold({}, copy=copy)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        return await self._training.write_held(state, model)

    def load(self, folder: str) -> None:
        self._training.load(folder)

    def stop(self) -> None:
        self._training.stop()
