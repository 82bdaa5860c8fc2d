"""The policy learner: one rank that turns batches into better log-probs of good tokens."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from rlx.core.config import LearnerConfig
from rlx.core.engine.interfaces import (
    FileMarks,
    PublicationPlan,
    SentWeights,
    UpdateResult,
    WeightsUpdate,
)
from rlx.core.engine.learner.distributed import gather, local_device
from rlx.core.engine.learner.gradients import (
    FiniteCheck,
    TokenGradients,
    differentiate,
    loss_inputs,
)
from rlx.core.engine.learner.model import Loaded, PackedPolicy, load_policy
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.engine.learner.planning import Plan
from rlx.core.engine.learner.publishing import Publishing
from rlx.core.engine.learner.training import Answers, MicroObjective, Seat, SeatOptions, Training
from rlx.core.engine.learner.weights_file import export_adapter, export_model
from rlx.core.errors import EngineError
from rlx.core.objective import ObjectiveSettings, policy_objective
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import TrainBatch


class PolicyLearner:
    """One rank of the data-parallel group that trains the policy (`interfaces.Learner`)."""

    def __init__(
        self,
        *,
        model: str,
        settings: LearnerConfig,
        objective: ObjectiveSettings,
        loss: ComponentRef,
        correction: ComponentRef,
        temperature: float,
        total_updates: int,
        **seat: Unpack[SeatOptions],
    ) -> None:
        self._source = model
        self._objective = objective
        self._loss_ref, self._correction_ref = loss, correction
        self._temperature = temperature
        self._publishing: Publishing | None = None
        self._training = Training(settings, seat=Seat(**seat), total_updates=total_updates)

    def start(self) -> Mapping[str, Any]:
        self._loss: Bound = self._loss_ref.resolve()
        self._correction: Bound = self._correction_ref.resolve()
        return self._training.start(self._load)

    def _load(self, device: torch.device) -> Loaded[PackedPolicy]:
        return load_policy(self._source, self._training.settings, self._temperature, device)

    def _forward(self, micro: MicroBatch, chunks: int) -> Answers:
        """Log-probs and entropies [n]."""
        return self._training.model.forward(
            micro, chunks=chunks, entropy_gradient=self._objective.entropy_coef > 0
        )

    def score(
        self, batch: TrainBatch, *, entropy: bool = False, as_it_started: bool = False
    ) -> np.ndarray:
        """Log-probs [N]; with `entropy` [2, N], log-probs and entropies.

        Args:
            as_it_started: without the adapter.
        """
        found = self._training.score(
            batch, self._forward, answers=2 if entropy else 1, as_it_started=as_it_started
        )
        return found if entropy else found[0]

    def update(
        self, batches: Sequence[TrainBatch], *, step: int, kl_coef: float | None = None
    ) -> UpdateResult | None:
        """One optimizer step for each batch; `kl_coef` replaces the objective's."""
        if len(batches) > 1 and any(batch.old_logprobs is None for batch in batches):
            raise EngineError("several optimizer steps on a batch need its old log-probs")
        settings = self._training.settings
        objective = functools.partial(self._micro_objective, step=step, kl_coef=kl_coef)
        trained = self._training.update(batches, self._forward, objective)
        if trained is None:
            return None
        skipped = {"policy/skipped_updates": float(trained.skipped)}
        return UpdateResult(
            metrics={
                **trained.metrics("policy"),
                **(skipped if settings.nonfinite == "skip" else {}),
            },
            logprobs=np.concatenate(trained.answers[: len(batches) // settings.epochs]),
            spans=trained.spans,
        )

    def _micro_objective(
        self, batch: TrainBatch, plan: Plan, *, step: int, kl_coef: float | None
    ) -> MicroObjective:
        extra = {**_step_statistics(batch), "metadata": {"step": step}}
        settings = self._objective
        if kl_coef is not None:
            settings = dataclasses.replace(settings, kl_coef=kl_coef)

        def gradients(micro: MicroBatch, answers: Answers) -> TokenGradients:
            logprobs, entropy = answers
            inputs = loss_inputs(batch, micro, logprobs, entropy, extra)
            check = FiniteCheck(batch, micro)
            check(inputs.logprobs, "the model's log-prob")
            check(inputs.advantages, "the advantage")
            compute = functools.partial(
                policy_objective,
                inputs,
                loss=self._loss,
                correction=self._correction,
                settings=settings,
                denominators=plan.denominators,
            )
            return differentiate(compute, (inputs.logprobs, inputs.entropy), check)

        return gradients

    def abort(self) -> None:
        self._training.abort()

    def offer_weights(self, plan: PublicationPlan) -> WeightsUpdate | None:
        if self._publishing is None:
            self._publishing = Publishing(self._training.model, rank=self._training.seat.rank)
        return self._publishing.offer(plan)

    def send_weights(self) -> SentWeights | None:
        assert self._publishing is not None
        return self._publishing.send()

    def abort_publication(self) -> None:
        if self._publishing is not None:
            self._publishing.abort()

    def hold(self, *, copy: bool, export: bool) -> None:
        components = {"loss": self._loss.state_dict(), "correction": self._correction.state_dict()}
        self._training.hold(components, copy=copy, export=self._source if export else None)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        return await self._training.write_held(state, model)

    def load(self, folder: str) -> None:
        components = self._training.load(folder)
        self._loss.load_state_dict(components["loss"])
        self._correction.load_state_dict(components["correction"])

    def export(self, folder: str, *, adapter: bool = False) -> None:
        write = export_adapter if adapter else export_model
        write(self._training.model, self._source, folder, writer=self._training.seat.rank == 0)

    def stop(self) -> None:
        if self._publishing is not None:
            self._publishing.close()
        self._training.stop()


def _step_statistics(batch: TrainBatch) -> dict[str, Tensor]:
    """Advantages and old log-probs of the whole optimizer step, for losses that look at all of it.

    Old log-probs that nobody required are not known before the last micro-batch, so not given.
    """
    if batch.advantages is None:
        return {}
    fields = {"step_advantages": batch.advantages}
    if batch.old_logprobs is not None:
        fields["step_old_logprobs"] = batch.old_logprobs
    everyone = gather(fields)
    return {
        name: torch.from_numpy(np.concatenate([theirs[name] for theirs in everyone])).to(
            local_device()
        )
        for name in fields
    }
