"""The loop of offline training: draw rows, update, evaluate, emit."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.core.config import RunConfig
from rlx.core.engine.checkpointing import Checkpointing, Models
from rlx.core.engine.checkpoints import CheckpointError, load_state, step_of
from rlx.core.engine.divergence import DivergenceGuard
from rlx.core.engine.fault_ledger import FaultLedger
from rlx.core.engine.interfaces import FileMarks, UpdateResult
from rlx.core.engine.metrics import merge
from rlx.core.engine.monitor import Monitor
from rlx.core.engine.objective_group import ObjectiveGroup
from rlx.core.engine.offline.best import Best
from rlx.core.engine.phases import Phases
from rlx.core.engine.reporting import Reporter
from rlx.core.engine.step_report import StepReport
from rlx.core.errors import RunInterrupted
from rlx.core.offline.draws import Draws
from rlx.core.offline.rows import RowBatch, join
from rlx.core.plugins import PluginSystem
from rlx.core.rewards import MEAN_KEY, STD_KEY
from rlx.core.run import Run, complete_metrics, model_name
from rlx.core.task_stream import other_data

_NORM_ROWS = 512
"""Rows on which the mean and the standard deviation of scores are measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSet:
    """Rows with all that the objective requires."""

    name: str
    rows: RowBatch
    others: RowBatch | None = None
    """Row for row, the prompt with another row's answer."""

    def first(self, count: int) -> DataSet:
        """Of `count` rows, or of all where there are fewer."""
        chosen = np.arange(min(count, self.rows.rollout_count))
        others = None if self.others is None else self.others.take(chosen)
        return DataSet(name=self.name, rows=self.rows.take(chosen), others=others)


class OfflineTrainer:
    """Owns the step counter; every part it drives is handed in."""

    def __init__(
        self,
        *,
        run: Run,
        config: RunConfig,
        learner: ObjectiveGroup,
        data: DataSet,
        draws: Draws,
        evaluation: Sequence[DataSet],
        scores: bool,
        reporter: Reporter,
        monitor: Monitor,
        plugins: PluginSystem,
        faults: FaultLedger,
        reference_seconds: float | None = None,
    ) -> None:
        """`scores`: the model gives one number a sequence, whose scale is saved with it;
        `reference_seconds`: what the reference's log-probs took, for the first line of metrics."""
        self._run = run
        self._config = config
        self._learner = learner
        self._data = data
        self._draws = draws
        self._evaluation = list(evaluation)
        self._scores = scores
        self._reference_seconds = reference_seconds
        self._reporter = reporter
        self._monitor = monitor
        self._plugins = plugins
        self._faults = faults
        self._report = StepReport(run, reporter=reporter, monitor=monitor, plugins=plugins)
        self._phases = Phases(monitor, faults)
        self._guard = DivergenceGuard(config.faults.bounds, steps=config.faults.bound_steps)
        self._rows_digest = data.rows.digest_with_labels
        self._best = Best(config.checkpoint.best)
        self.step = 0
        self.metrics: dict[str, float] = {}
        self._evaluated: int | None = None
        self._checkpoints = Checkpointing(
            run.checkpoints,
            config.checkpoint,
            Models(policy=self, folder=model_name(config.learner.lora.enabled)),
            status=reporter.status,
            written=lambda step, path: plugins.notify(
                "rlx_on_checkpoint", run=run, step=step, path=path
            ),
        )
        # While a step is under way: where the draws were before it.
        self._before_step: dict[str, Any] | None = None
        self._updating = False
        self._measuring = False
        self._stop_reason: str | None = None
        self._background: set[asyncio.Task[Any]] = set()

    async def train(self) -> str:
        """Run until the last step, a stop request or a plugin's wish; return the reason."""
        await self._check_best()
        try:
            if self._evaluation_is_due():
                await self._evaluate_at_rest()
            while self.step < self._config.steps and self._stop_reason is None:
                self._checkpoints.check()
                await self._train_step()
        except RunInterrupted:
            if self._stop_reason is None:
                raise
            await self.checkpoint(last=True)
        except CheckpointError:
            raise
        except BaseException as error:
            if not getattr(error, "weights_changed", self._updating):
                await self.checkpoint(last=True)
            raise
        else:
            await self.checkpoint(last=True)
        finally:
            await self._checkpoints.close()
        return self._stop_reason or f"all {self._config.steps} steps are done"

    async def _train_step(self) -> None:
        """One optimizer step.

        Consumes rows of the data; produces new weights and one line of metrics. Waits for the
        learner. Unblocked early by `request_stop`.
        """
        self._phases.begin()
        self._before_step = self._draws.state_dict()
        chosen = self._draws.next()
        batch = self._data.rows.take(chosen)
        with self._timed("update"):
            update = await self._update(batch, chosen)
        self._monitor.update(update.spans)
        self.step += 1
        self._before_step = None
        self._faults.finished(self.step)
        seconds = self._phases.seconds
        speed = {
            "throughput/rows_per_s": batch.rollout_count / seconds,
            "throughput/tokens_per_s": len(batch.tokens) / seconds,
            "data/epoch": self._draws.epoch,
        }
        numbers = merge(update.metrics, speed)
        diverged = self._guard.note(self.step, numbers)
        try:
            evaluation = await self._evaluate()
            if self._checkpoint_is_due():
                with self._timed("checkpoint"):
                    await self.checkpoint(metrics=merge(numbers, evaluation))
        except BaseException:  # the step itself is done, and is not lost
            self._emit(numbers)
            raise
        self._emit(merge(numbers, evaluation, await self._monitor.take()))
        if diverged is not None:
            raise diverged

    async def _update(self, batch: RowBatch, chosen: np.ndarray) -> UpdateResult:
        others = self._data.others
        self._updating = True
        update = await self._learner.update(
            batch, step=self.step, others=None if others is None else others.take(chosen)
        )
        self._updating = False  # after an error it stays: weights may have changed
        if update is None:
            raise RunInterrupted(self._stop_reason or "the update was given up")
        return update

    def _emit(self, numbers: Mapping[str, float]) -> None:
        self._phases.current = "emit"
        times = {f"time/{name}": value for name, value in self._phases.times.items()}
        if self._reference_seconds is not None:
            times["time/reference"] = self._reference_seconds
            self._reference_seconds = None
        times |= self._checkpoints.take_metrics()
        seconds = self._phases.seconds
        faults = self._faults.take_metrics()
        self.metrics = merge(numbers, faults, times, {"time/step": seconds})
        wish = self._report.emit(self.step, self.metrics, seconds=seconds)
        if wish and self._stop_reason is None:
            self._stop_reason = wish

    # -------------------------------------------------------------------------- evaluation

    def _evaluation_is_due(self) -> bool:
        settings, step = self._config.eval, self.step
        if not self._evaluation or step == self._evaluated:
            return False
        if step == 0:
            return settings.before_training
        return step >= self._config.steps or (settings.every > 0 and step % settings.every == 0)

    async def _check_best(self) -> None:
        """Find out before the first step whether evaluation gives the metric of `checkpoint.best`.

        What an objective measures, only the objective says, on rows: here the first of each rank.
        """
        held_out = next((one for one in self._evaluation if one.name == self._best.source), None)
        if held_out is not None:
            self._best.check(await self._measure(held_out.first(self._learner.ranks)))

    async def _measure(self, held_out: DataSet) -> dict[str, float]:
        prefix = f"eval/{held_out.name}/"
        return await self._learner.measure(
            held_out.rows, step=self.step, prefix=prefix, others=held_out.others
        )

    async def _evaluate(self) -> dict[str, float]:
        """Loss and metrics on held-out rows under the present weights; empty when none is due."""
        if not self._evaluation_is_due():
            return {}
        self._reporter.status("evaluating")
        metrics: dict[str, float] = {}
        self._measuring = True
        try:
            with self._timed("eval"):
                for held_out in self._evaluation:
                    metrics |= await self._measure(held_out)
        finally:
            self._measuring = False
        self._evaluated = self.step
        self._best.note(self.step, metrics)
        self._plugins.notify("rlx_on_eval_end", run=self._run, step=self.step, results=metrics)
        return metrics

    async def _evaluate_at_rest(self) -> None:
        """Evaluate before the first step, or make up for an evaluation that was interrupted."""
        self._phases.begin()
        metrics = await self._evaluate()
        self._reporter.log(self.step, {**metrics, "time/eval": self._phases.times["eval"]})
        if self._best.step == self.step:
            await self.checkpoint()

    # ------------------------------------------------------------------------- checkpoints

    def _checkpoint_is_due(self) -> bool:
        every = self._config.checkpoint.every
        is_regular = bool(every) and self.step % every == 0 and self.step < self._config.steps
        return (is_regular or self._best.step == self.step) and not self._guard.suspicious

    async def checkpoint(
        self, *, last: bool = False, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save the state after the last finished step, once; with `last` return when it is done."""
        state = {
            "metrics": metrics,
            "step": self.step,
            "draws": self._before_step or self._draws.state_dict(),
            "rows": self._rows_digest,
            "evaluated": self._evaluated,
            "best": self._best.state_dict(),
        }
        await self._checkpoints.save(self.step, state, best=self._best.step, last=last)

    async def resume(self, folder: Path) -> None:
        """Take up the state of a checkpoint; raises UsageError when it is of other data."""
        state = load_state(folder)
        if state.get("rows", self._rows_digest) != self._rows_digest:
            raise other_data("other rows or tokens", "these")
        self._draws.load_state_dict(state["draws"])
        self._evaluated = state["evaluated"]
        self._best.load_state_dict(state["best"])
        await self._learner.load(str(folder / "policy"))
        self.step = self._faults.step = step_of(folder)
        self._checkpoints.start_from(self.step)
        complete_metrics(self._run.folder, self.step, state.get("metrics"))

    async def hold(self, *, copy: bool, export: bool) -> None:
        """Take hold of the model in memory (`checkpointing.Holder`)."""
        facts = await self._scale() if self._scores else {}
        await self._learner.hold(copy=copy, export=export, facts=facts)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        return await self._learner.write_held(state, model)

    async def export(self, folder: str, *, adapter: bool = False) -> None:
        """Write a Hugging Face folder of the present weights, or the adapter alone."""
        facts = await self._scale() if self._scores else {}
        await self._learner.export(folder, facts, adapter=adapter)

    async def _scale(self) -> dict[str, float]:
        """Mean and standard deviation of the scores of held-out rows, else of training rows."""
        held_out = [one.rows for one in self._evaluation]
        rows = join(held_out) if held_out else self._data.rows
        count = min(rows.rollout_count, _NORM_ROWS)
        chosen = np.linspace(0, rows.rollout_count - 1, count).round().astype(np.int64)
        scores = (await self._learner.score(rows.take(chosen))).astype(np.float64)
        return {MEAN_KEY: float(scores.mean()), STD_KEY: float(scores.std()) or 1.0}

    # ------------------------------------------------------------------------ interruption

    @property
    def saving(self) -> bool:
        """Whether it is at what would be lost if it were cut: new weights, or a checkpoint."""
        return self._updating or self._checkpoints.busy

    def request_stop(self, reason: str) -> None:
        """Ask the run to end after the last finished step (called from a signal handler).

        An evaluation gives up, and so does an update that has not changed a weight yet; anything
        else takes a moment and is waited for.
        """
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        if self._updating or self._measuring:
            task = asyncio.get_running_loop().create_task(self._learner.abort())
            self._background.add(task)

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self._phases.timed(phase, step=self.step)
