"""What every learner does, whatever its model says: pack, accumulate, step, save, resume.

An update is a list of batches, one for each optimizer step in order. Each is packed into
micro-batches, and each of those goes through

    answers of the model → objective → gradient per token → backward

before the gradients of all micro-batches and ranks make one step. What the answers are (log-probs,
values) and what the objective is, the learner says by two functions.
"""

from __future__ import annotations

import asyncio
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypeAlias, TypedDict, TypeVar

import numpy as np
import torch
from torch import Tensor

from rlx.core.config import LearnerConfig
from rlx.core.engine.interfaces import FileMarks
from rlx.core.engine.learner.checkpoint import HeldLearner, hold_learner, load_learner
from rlx.core.engine.learner.distributed import (
    gather,
    highest,
    join_group,
    leave_group,
    local_device,
)
from rlx.core.engine.learner.gradients import TokenGradients, no_gradients
from rlx.core.engine.learner.lora import Adapter
from rlx.core.engine.learner.memory import with_known_sizes
from rlx.core.engine.learner.model import Loaded
from rlx.core.engine.learner.packing import MicroBatch, Packable
from rlx.core.engine.learner.planning import Plan, make_plan
from rlx.core.engine.learner.schedule import learning_rate
from rlx.core.engine.learner.scorer import score_batch
from rlx.core.engine.learner.sharded import ShardedModel
from rlx.core.engine.learner.weights_file import held_weights, write_held
from rlx.core.engine.pulse import beat
from rlx.core.engine.trace import Span
from rlx.core.errors import ComponentError, EngineError, NonFiniteError, RlxError, RunInterrupted
from rlx.core.objective import MetricSums

B = TypeVar("B", bound=Packable)
Answers: TypeAlias = tuple[Tensor, ...]
"""What the model says of the action tokens [n] of a micro-batch; scores are the first of them."""
Forward: TypeAlias = Callable[[MicroBatch, int], Answers]
"""Micro-batch and pieces of the vocabulary projection → answers."""
MicroObjective: TypeAlias = Callable[[MicroBatch, Answers], TokenGradients]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """A rank's place among the ranks of its learner, and on its machine."""

    rank: int
    world: int
    master_port: int
    threads: int
    seed: int
    master_address: str = "127.0.0.1"


class SeatOptions(TypedDict):
    """The fields of a `Seat`, as arguments of a learner."""

    rank: int
    world: int
    master_port: int
    threads: int
    seed: int
    master_address: NotRequired[str]


@dataclass(slots=True, kw_only=True)
class Trained:
    """What the optimizer steps of one update came to."""

    parts: MetricSums = field(default_factory=MetricSums)
    norms: list[float] = field(default_factory=list)
    """Of the gradients of the steps that were taken."""
    rate: float = 0.0
    skipped: int = 0
    spans: list[Span] = field(default_factory=list)
    """Micro-batches and optimizer steps."""
    answers: list[np.ndarray] = field(default_factory=list)
    """First answer [N] to each batch, before its step; NaN where a pass was not finished."""

    def metrics(self, role: str) -> dict[str, float]:
        """Metrics over all ranks, which all call it; `role` is `policy` or `critic`."""
        taken = {f"{role}/grad_norm": float(np.mean(self.norms))} if self.norms else {}
        return {**merged_metrics(self.parts), **taken, f"{role}/lr": self.rate}


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What is in memory for a checkpoint."""

    learner: HeldLearner
    model: dict[str, Tensor] | None
    """Whole weights (of the adapter), on the rank that writes them."""
    source: str | None
    """Folder of the tokenizer that goes beside them."""


class Training:
    """One rank of a model in training."""

    model: ShardedModel

    def __init__(self, settings: LearnerConfig, *, seat: Seat, total_updates: int) -> None:
        self.settings = settings
        self.seat = seat
        self.updates = 0
        """Optimizer steps taken."""
        self._total_updates = total_updates
        self._abort = threading.Event()
        self._held: Held | None = None
        self._asleep = False

    def start(self, load: Callable[[torch.device], Loaded[Any]]) -> Mapping[str, Any]:
        """Join the other ranks, load the model and its optimizer; returns facts."""
        seat = self.seat
        torch.set_num_threads(seat.threads)
        torch.manual_seed(seat.seed + seat.rank)
        join_group(
            rank=seat.rank,
            world=seat.world,
            address=seat.master_address,
            port=seat.master_port,
        )
        loaded = load(local_device())
        facts = loaded.facts()
        self._packing = loaded.packing
        self.settings = with_known_sizes(self.settings, loaded, local_device())
        adapter = None
        if self.settings.lora.enabled:
            model, lora = loaded.module.model, self.settings.lora
            adapter = Adapter(model, lora, head=loaded.head, seed=seat.seed)
            facts |= adapter.facts()
        self.model = ShardedModel(
            loaded.module,
            self.settings,
            dtype=loaded.dtype,
            world=seat.world,
            adapter=adapter,
        )
        return {**facts, "zero_stage": self.model.stage}

    def score(
        self, batch: Packable, forward: Forward, *, answers: int = 1, as_it_started: bool = False
    ) -> np.ndarray:
        """First answers [answers, N] to this rank's batch under the current weights.

        Args:
            as_it_started: under those that the adapter was put beside.
        """
        with self.model.as_it_started() if as_it_started else nullcontext():
            return score_batch(forward, batch, self._plan(batch), answers=answers)

    @torch.no_grad()
    def measure(
        self,
        batch: B,
        forward: Forward,
        share: Callable[[B, Plan], Callable[[MicroBatch, Answers], MetricSums]],
    ) -> dict[str, float]:
        """Metrics over all ranks, which all call it, under the current weights.

        Raises:
            RunInterrupted: `abort` came meanwhile.
        """
        plan = self._plan(batch)
        parts, measured = MetricSums(), share(batch, plan)
        try:
            for micro, chunks in zip(plan.micro_batches, plan.chunks, strict=True):
                found, error = _measure(measured, micro, forward(micro, chunks))
                if not self._go_on(error, may_abort=True):
                    raise RunInterrupted("the evaluation was given up")
                parts.add(found)
        finally:
            self._abort.clear()
        return merged_metrics(parts)

    def update(
        self,
        batches: Sequence[B],
        forward: Forward,
        objective: Callable[[B, Plan], MicroObjective],
    ) -> Trained | None:
        """One optimizer step for each batch; None when aborted before the first one.

        Raises:
            NonFiniteError: a number that must be finite is not; under `nonfinite: skip` the step is
                left out and counted instead.
        """
        trained = Trained()
        self._wake()
        try:
            for batch in batches:
                if not self._step(batch, forward, objective, trained):
                    return None
        except RlxError as error:
            error.weights_changed = bool(trained.norms)
            raise
        finally:
            self._abort.clear()
            if self.settings.sleep and not self._asleep:
                self.model.sleep()
                self._asleep = True
        return trained

    def _step(
        self,
        batch: B,
        forward: Forward,
        objective: Callable[[B, Plan], MicroObjective],
        trained: Trained,
    ) -> bool:
        """One optimizer step; false when given up."""
        plan = self._plan(batch)
        passed = np.full(batch.action_count, np.nan, np.float32)
        parts = MetricSums()
        may_abort = not trained.answers
        trained.answers.append(passed)
        trained.rate = learning_rate(self.settings, self.updates, self._total_updates)
        try:
            gradients = objective(batch, plan)
            with self.model.learning():
                done = self._accumulate(plan, forward, gradients, passed, parts, trained, may_abort)
            if not done:
                return False
            started = time.time()
            trained.norms.append(self.model.step(trained.rate))
            trained.spans.append(Span("optimizer step", started, time.time()))
        except NonFiniteError as error:
            if self.settings.nonfinite == "raise":
                raise
            warnings.warn(f"an optimizer step was left out: {error}", stacklevel=2)
            trained.skipped += 1
            return True
        trained.parts.add(parts)
        self.updates += 1
        return True

    def _accumulate(
        self,
        plan: Plan,
        forward: Forward,
        objective: MicroObjective,
        passed: np.ndarray,
        parts: MetricSums,
        trained: Trained,
        may_abort: bool,
    ) -> bool:
        """Gradients of one optimizer step, answers into `passed` [N]; false when given up."""
        last = len(plan.micro_batches) - 1
        for index, micro in enumerate(plan.micro_batches):
            started = time.time()
            answers = forward(micro, plan.chunks[index])
            passed[micro.actions] = answers[0].detach().cpu().numpy()
            gradients, error = _differentiate(objective, micro, answers)
            if not self._go_on(error, may_abort=may_abort):
                return False
            pairs = zip(answers, gradients.answers, strict=True)
            products = [(answer * g).sum() for answer, g in pairs if answer.requires_grad]
            self.model.backward(torch.stack(products).sum(), last=index == last)
            parts.add(gradients.metrics)
            trained.spans.append(Span(f"{len(micro.tokens)} rows", started, time.time()))
        return True

    def _go_on(self, error: RlxError | None, *, may_abort: bool) -> bool:
        """Agree with the other ranks whether to go on; raises the first failed rank's error."""
        beat()
        failed, given_up = highest(error is not None, may_abort and self._abort.is_set())
        if failed or given_up:
            self.model.discard()
        if failed:
            raise next(found for found in gather(error) if found is not None)
        return not given_up

    def abort(self) -> None:
        """Ask a running update to give up before its first optimizer step, or a measurement."""
        self._abort.set()

    def _wake(self) -> None:
        """Bring back what was moved to the host's memory."""
        if self._asleep:
            self.model.wake()
        self._asleep = False

    def hold(
        self, components: Mapping[str, Mapping[str, Any]], *, copy: bool, export: str | None = None
    ) -> None:
        """Take hold of the state for a checkpoint. All ranks call it.

        Args:
            copy: training goes on before it is written.
            export: model folder whose tokenizer goes beside what others load (the model, or the
                adapter); None: that is not held.
        """
        self._wake()
        model = None
        if export is not None:
            model = held_weights(self.model, writer=self.seat.rank == 0, copy=copy)
        self._held = Held(
            learner=hold_learner(
                self.model,
                rank=self.seat.rank,
                world=self.seat.world,
                updates=self.updates,
                components=components,
                copy=copy,
            ),
            model=model,
            source=export,
        )

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        """Write what is held, in a thread of its own; returns what rank files must turn out to
        be, relative to the folder `state`."""
        held, self._held = self._held, None
        if held is None:
            raise EngineError("nothing is held for a checkpoint")
        return await asyncio.to_thread(self._write, held, state, model)

    def _write(self, held: Held, state: str, model: str | None) -> FileMarks:
        marks = held.learner.write(state)
        if model is not None and held.model is not None and held.source is not None:
            write_held(self.model, held.source, model, held.model)
        return marks

    def load(self, folder: str) -> dict[str, dict[str, Any]]:
        """Restore what was written; returns the state of the components. All ranks call it."""
        self._wake()
        self.updates, components = load_learner(self.model, folder, rank=self.seat.rank)
        return components

    def stop(self) -> None:
        leave_group()

    def _plan(self, batch: Packable) -> Plan:
        return make_plan(batch, self.settings, packing=self._packing)


def merged_metrics(parts: MetricSums) -> dict[str, float]:
    """Metrics from the parts of all ranks, which all call it."""
    merged = MetricSums()
    # An idle rank has no entries, so parts are merged by name.
    for part in gather(parts):
        merged.add(part)
    return merged.metrics()


def _measure(
    measured: Callable[[MicroBatch, Answers], MetricSums], micro: MicroBatch, answers: Answers
) -> tuple[MetricSums, RlxError | None]:
    """Metrics of a micro-batch, or none with the error that stopped them."""
    if not micro.action_count:
        return MetricSums(), None
    try:
        return measured(micro, answers), None
    except RlxError as error:
        return MetricSums(), error
    except Exception as error:
        text = f"the objective failed: {type(error).__name__}: {error}"
        failure = ComponentError(text)
        failure.__cause__ = error
        return MetricSums(), failure


def _differentiate(
    objective: MicroObjective, micro: MicroBatch, answers: Answers
) -> tuple[TokenGradients, RlxError | None]:
    """Gradients per token, or zeros with the error that stopped them."""
    if not micro.action_count:
        return no_gradients(answers), None
    try:
        return objective(micro, answers), None
    except RlxError as error:
        return no_gradients(answers), error
