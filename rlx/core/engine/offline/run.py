"""`train_offline(config)`: checks everything, starts the learner, runs the loop, cleans up."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from rlx.core.config import RunConfig
from rlx.core.engine import workers
from rlx.core.engine.monitor import Monitor
from rlx.core.engine.objective_group import ObjectiveGroup
from rlx.core.engine.offline.prepare import OfflinePlan, prepare_offline
from rlx.core.engine.offline.reference import with_reference
from rlx.core.engine.offline.trainer import DataSet, OfflineTrainer
from rlx.core.engine.session import Session, TrainResult
from rlx.core.offline.rows import RowBatch
from rlx.core.plugins import PluginSystem
from rlx.core.run import Run, write_manifest

Score = Callable[[RowBatch], Awaitable[np.ndarray]]


def train_offline(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
) -> TrainResult:
    """Train `config.objective` on the data and return when the run has ended.

    Raises:
        UsageError: for a mistake in the configuration or the data, before anything is started.
        ComponentError: when a component failed; the last finished step is then in a checkpoint.
        EngineError: when a worker failed.
    """
    plan = prepare_offline(config, plugins=plugins, resume=resume, origins=origins)
    return run_offline(plan)


def run_offline(plan: OfflinePlan) -> TrainResult:
    """Train as planned and return when the run has ended."""
    return asyncio.run(OfflineSession(plan).run())


class OfflineSession(Session):
    """Training on fixed data."""

    def __init__(self, plan: OfflinePlan) -> None:
        super().__init__(
            plan.config,
            selected=plan.selection,
            trackers=plan.selection.trackers,
            plugins=plan.plugins,
            checkpoint=plan.checkpoint,
            objective=plan.selection.objective.name,
        )
        self._plan = plan

    async def _work(self, run: Run) -> str:
        plan = self._plan
        for source in (*plan.sources, *plan.evaluation):
            for complaint in source.complaints():
                self._reporter.status(complaint)
        learner, score = await self._start_workers()
        self._write_manifest(self._crew.facts)
        started = time.perf_counter()
        data, evaluation = await self._data(score)
        reference_seconds = time.perf_counter() - started
        trainer = OfflineTrainer(
            run=run,
            config=plan.config,
            learner=learner,
            data=data,
            draws=plan.draws(),
            evaluation=evaluation,
            scores=plan.selection.needs.head == "score",
            reference_seconds=(
                reference_seconds if "ref_logprobs" in plan.selection.requires else None
            ),
            reporter=self._reporter,
            monitor=Monitor(self._trace, [self._crew.memory]),
            plugins=plan.plugins,
            faults=self._crew.faults,
        )
        if plan.resume and self._checkpoint is None:
            self._reporter.status("no checkpoint was written yet: starting from the beginning")
        if self._checkpoint is not None:
            self._reporter.status(f"resuming from {self._checkpoint.name}")
            await trainer.resume(self._checkpoint)
        self._trainer = trainer
        self._reporter.status("training")
        reason = await trainer.train()
        if trainer.step >= plan.config.steps:
            if plan.config.checkpoint.export:
                self._reporter.status("exporting the model")
                await trainer.export(str(self._folder / "export"))
            self._mark_finished(trainer)
        return reason

    async def _start_workers(self) -> tuple[ObjectiveGroup, Score]:
        """The learner, and who gives the reference's log-probs: the learner itself as long as it
        has its starting weights, unless the reference is another model."""
        plan, config = self._plan, self._config
        specs = workers.objective_specs(
            config,
            plan.model,
            plan.selection,
            dtype=plan.dtype,
            pad=plan.pad,
            teacher=plan.teacher,
        )
        references = []
        if plan.reference is not None:
            references = [
                workers.reference_spec(config, plan.reference, dtype=plan.dtype, temperature=1.0)
            ]
        started = await self._crew.start([*specs, *references])
        learner = ObjectiveGroup([started[spec.name] for spec in specs])
        if not references:
            return learner, learner.score
        return learner, ObjectiveGroup([started[references[0].name]]).score

    async def _data(self, score: Score) -> tuple[DataSet, list[DataSet]]:
        """All rows, with the reference's log-probs where they are required.

        They are computed before a checkpoint is loaded, while the learner is the reference.
        """
        plan = self._plan
        rows, others = plan.rows()
        sets = [DataSet(name="training", rows=rows, others=others)]
        sets += [
            DataSet(name=source.name, rows=source.rows, others=source.others)
            for source in plan.evaluation
        ]
        if "ref_logprobs" in plan.selection.requires:
            sets = [await self._with_reference(one, score) for one in sets]
        return sets[0], sets[1:]

    async def _with_reference(self, one: DataSet, score: Score) -> DataSet:
        plan = self._plan
        quantization = self._config.learner.lora.quantization

        async def filled(rows: RowBatch) -> RowBatch:
            return await with_reference(
                rows,
                score,
                folder=self._config.offline.reference_cache or self._folder / "reference",
                model=plan.reference or plan.model,
                dtype=f"{plan.dtype}, {quantization}" if quantization else plan.dtype,
                status=self._reporter.status,
            )

        others = None if one.others is None else await filled(one.others)
        return dataclasses.replace(one, rows=await filled(one.rows), others=others)

    def _write_manifest(self, facts: Mapping[str, Any]) -> None:
        plan = self._plan
        write_manifest(
            self._folder,
            config=self._config,
            components=plan.selection.manifest(),
            plugins=plan.plugins.manifest(plan.selection.components),
            facts={
                **facts,
                "objective": plan.selection.objective.name,
                "sources": [source.describe() for source in plan.sources],
                "evaluation": [source.describe() for source in plan.evaluation],
                "rows": sum(source.rows.rollout_count for source in plan.sources),
                "origins": dict(plan.origins),
            },
        )
