"""The loop of post-training: sample, reward, keep, score, advantage, update, publish, emit."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import warnings
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from rlx.core.component import Bound
from rlx.core.config import RunConfig
from rlx.core.engine.batches import make_batch
from rlx.core.engine.checkpointing import Checkpointing, Models
from rlx.core.engine.checkpoints import load_state, step_of
from rlx.core.engine.collector import Collected, Collection, unwrap
from rlx.core.engine.critic import Critic
from rlx.core.engine.divergence import DivergenceGuard, checkpoint_to_return_to
from rlx.core.engine.emission import Emission
from rlx.core.engine.estimation import Estimation, Reference
from rlx.core.engine.evaluations import Evaluations
from rlx.core.engine.fault_ledger import FaultLedger
from rlx.core.engine.interfaces import UpdateResult
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.metrics import merge, rollout_metrics
from rlx.core.engine.monitor import Monitor
from rlx.core.engine.phases import Phases
from rlx.core.engine.records import Decode
from rlx.core.engine.reporting import Reporter
from rlx.core.engine.run_state import RunState
from rlx.core.engine.step_report import StepReport
from rlx.core.engine.views import shown_batch, shown_groups
from rlx.core.errors import (
    DivergedError,
    NonFiniteError,
    RlxError,
    RunInterrupted,
    WorkerLostError,
)
from rlx.core.kl import kl_controller
from rlx.core.plugins import PluginSystem
from rlx.core.rollouts import TrainBatch
from rlx.core.run import Run, complete_metrics, model_name, truncate_metrics

_BEFORE_UPDATE = ("rollout", "score", "advantage")
_AT_REST = (*_BEFORE_UPDATE, "eval")
"""Phases in which the state is that after the last finished step."""


class _Engine(Protocol):
    async def abort(self) -> None: ...

    async def sleep(self) -> None: ...


class _Publisher(Protocol):
    async def publish(self, learner: LearnerGroup, engine: Any, *, version: int) -> None: ...

    def metrics(self) -> Mapping[str, float]: ...


class Trainer:
    """Owns the step counter; every part it drives is handed in."""

    def __init__(
        self,
        *,
        run: Run,
        config: RunConfig,
        collector: Collection,
        evaluations: Evaluations | None,
        estimator: Bound,
        learner: LearnerGroup,
        reference: Reference | None,
        critic: Critic | None,
        engine: _Engine,
        publisher: _Publisher,
        reporter: Reporter,
        monitor: Monitor,
        plugins: PluginSystem,
        faults: FaultLedger,
        needs_old_logprobs: bool,
        reward_weights: Mapping[str, float],
        decode: Decode,
    ) -> None:
        self._run = run
        self._config = config
        self._collector = collector
        self._evaluations = evaluations
        self._learner = learner
        self._critic = critic
        self._kl = kl_controller(
            config.kl.controller,
            coef=config.kl.coef,
            target=config.kl.target,
            horizon=config.kl.horizon,
        )
        self._estimation = Estimation(
            config,
            estimator=estimator,
            learner=learner,
            reference=reference,
            critic=critic,
            needs_old_logprobs=needs_old_logprobs,
            reward_weights=reward_weights,
        )
        self._state = RunState(
            learner=learner,
            critic=critic,
            collector=collector,
            estimator=estimator,
            kl=self._kl,
            reward_norm=self._estimation.reward_norm,
            evaluations=evaluations,
        )
        self._engine = engine
        self._publisher = publisher
        self._reporter = reporter
        self._monitor = monitor
        self._plugins = plugins
        self._faults = faults
        self._phases = Phases(monitor, faults)
        self._guard = DivergenceGuard(config.faults.bounds, steps=config.faults.bound_steps)
        self.step = 0
        self._checkpoints = Checkpointing(
            run.checkpoints,
            config.checkpoint,
            Models(policy=learner, critic=critic, folder=model_name(config.learner.lora.enabled)),
            status=reporter.status,
            written=lambda step, path: plugins.notify(
                "rlx_on_checkpoint", run=run, step=step, path=path
            ),
        )
        self._emission = Emission(
            StepReport(run, reporter=reporter, monitor=monitor, plugins=plugins),
            self._phases,
            logging=config.logging,
            decode=decode,
            sources=[faults.take_metrics, publisher.metrics, self._checkpoints.take_metrics],
        )
        # While a step is under way: the state that a resumed run needs to begin it again, with
        # the same tasks and seeds.
        self._before_step: dict[str, Any] | None = None
        self._step_task: asyncio.Task[None] | None = None
        self._stop_reason: str | None = None
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last step; empty before it."""
        return self._emission.metrics

    async def train(self) -> str:
        """Run until the last step, a stop request or a plugin's wish; return the reason."""
        try:
            if self._evaluation_is_due():
                await self._cancellable(self._evaluate_at_rest())
            while self.step < self._config.steps and self._stop_reason is None:
                self._checkpoints.check()
                try:
                    await self._cancellable(self._train_step())
                except (DivergedError, NonFiniteError) as error:
                    await self._roll_back(error)
        except BaseException as error:
            if self._is_at_rest(error):
                await self._checkpoint_after(error)
            raise unwrap(error) from unwrap(error).__cause__
        else:
            await self.checkpoint(last=True)
        finally:
            await self._checkpoints.close()
            await self._collector.close()
        return self._stop_reason or f"all {self._config.steps} steps are done"

    def _is_at_rest(self, error: BaseException) -> bool:
        """Whether the state is still that after the last finished step."""
        if isinstance(error, asyncio.CancelledError):
            return False
        found = unwrap(error)
        if isinstance(found, WorkerLostError) and self._trains(found.worker):
            return False
        kept = self._phases.current == "update" and not getattr(error, "weights_changed", True)
        return self._phases.current in (*_AT_REST, "emit") or kept

    def _trains(self, worker: str) -> bool:
        """Whether the worker holds a part of the state that is trained."""
        critic = self._critic is not None and self._critic.has(worker)
        return critic or self._learner.has(worker)

    async def _checkpoint_after(self, error: BaseException) -> None:
        """Save what there is before an error ends the run; a second error must not hide it."""
        try:
            await self.checkpoint(last=True)
        except RlxError as failure:
            warnings.warn(f"the state after step {self.step} is not saved: {failure}", stacklevel=2)

    async def _train_step(self) -> None:
        """One training step.

        Consumes tasks from the sampler; produces a new policy version and one line of metrics.
        Waits for the engine, then rewards, then the learner. Unblocked early by `request_stop`.
        """
        self._phases.begin()
        self._before_step = copy.deepcopy(await self._state.state_dict(self.step))
        with self._timed("rollout"):
            collected = await self._collector.collect(self._config.rollout.groups)
        self._notify("rlx_on_rollouts", groups=shown_groups(collected.groups))
        batch = make_batch(collected.groups)
        await self._engine.sleep()
        with self._timed("score"):
            batch = await self._estimation.score(batch)
        with self._timed("advantage"):
            batch, advantages = self._estimation.advantages(batch, collected, kl_coef=self._kl.coef)
        extra = self._plugins.step_metrics(
            run=self._run, step=self.step + 1, batch=shown_batch(batch)
        )
        with self._timed("update"):
            update = await self._update(batch)
        if update is None:
            self._phases.current = "idle"
            raise RunInterrupted(self._stop_reason or "the update was given up")
        self._monitor.update(update.spans)
        self.step += 1
        self._before_step = None
        self._faults.finished(self.step)
        with self._timed("publish"):
            await self.publish()
        numbers = merge(
            rollout_metrics(collected.groups, by_source=bool(self._config.data.sources)),
            collected.metrics,
            advantages,
            update.metrics,
            extra,
        )
        diverged = self._guard.note(self.step, numbers)
        try:
            evaluation = await self._evaluate()
        except BaseException:  # the step itself is done, and is not lost
            self._emit(collected, batch, numbers, update)
            raise
        if self._checkpoint_is_due():
            with self._timed("checkpoint"):
                await self.checkpoint(metrics=merge(numbers, evaluation))
        self._phases.current = "emit"
        numbers = merge(numbers, evaluation, await self._monitor.take())
        self._emit(collected, batch, numbers, update)
        self._phases.current = "idle"
        if diverged is not None:
            raise diverged

    def _evaluation_is_due(self) -> bool:
        return self._evaluations is not None and self._evaluations.due(self.step)

    async def _evaluate(self) -> dict[str, float]:
        """The metrics of an evaluation of the present weights; empty when none is due."""
        if self._evaluations is None or not self._evaluations.due(self.step):
            return {}
        with self._timed("eval"):
            return await self._evaluations.evaluate(self.step)

    async def _evaluate_at_rest(self) -> None:
        """Evaluate before the first step, or make up for an evaluation that was interrupted."""
        self._phases.begin()
        metrics = await self._evaluate()
        self._reporter.log(self.step, {**metrics, "time/eval": self._phases.times["eval"]})
        self._phases.current = "idle"
        if self._is_best():
            await self.checkpoint()

    async def _update(self, batch: TrainBatch) -> UpdateResult | None:
        """Train on the batch; the KL coefficient in force goes with it, and moves after it."""
        coef = self._kl.coef
        if self._critic is None:
            update = await self._learner.update(batch, step=self.step, kl_coef=coef)
        else:
            update = await self._critic.update_with(
                self._learner, batch, step=self.step, kl_coef=coef
            )
        if update is None or self._config.kl.coef == 0:
            return update
        if (kl := update.metrics.get("policy/kl_ref")) is not None:
            self._kl.update(kl, batch.rollout_count)
        return dataclasses.replace(update, metrics={**update.metrics, "policy/kl_coef": coef})

    def _emit(
        self,
        collected: Collected,
        batch: TrainBatch,
        numbers: Mapping[str, float],
        update: UpdateResult,
    ) -> None:
        wish = self._emission.emit(
            self.step, numbers, collected=collected, batch=batch, update=update
        )
        if wish and self._stop_reason is None:
            self._stop_reason = wish

    def _notify(self, hook: str, **arguments: Any) -> None:
        """Call an observer about the step under way."""
        self._plugins.notify(hook, run=self._run, step=self.step + 1, **arguments)

    def _checkpoint_is_due(self) -> bool:
        every = self._config.checkpoint.every
        is_regular = bool(every) and self.step % every == 0 and self.step < self._config.steps
        return (is_regular or self._is_best()) and not self._guard.suspicious

    def _is_best(self) -> bool:
        return self._best_step() == self.step

    def _best_step(self) -> int | None:
        return None if self._evaluations is None else self._evaluations.best_step

    async def checkpoint(
        self, *, last: bool = False, metrics: Mapping[str, float] | None = None
    ) -> None:
        """Save the state after the last finished step, once; with `last` return when it is done."""
        state = self._before_step or await self._state.state_dict(self.step)
        whole = {**state, "metrics": metrics}
        await self._checkpoints.save(self.step, whole, best=self._best_step(), last=last)

    async def resume(self, folder: Path) -> None:
        """Take up the state of a checkpoint and give its weights to the engine."""
        state = load_state(folder)
        await self._collector.load_state_dict(state["collector"])
        await self._load(folder, state)
        complete_metrics(self._run.folder, self.step, state.get("metrics"))

    async def _roll_back(self, error: DivergedError | NonFiniteError) -> None:
        """Go back to the last checkpoint from before `error`, and on with other tasks and seeds:
        the same ones would lead to the same place. Raises where that may not or can't be."""
        await self._checkpoints.close()
        folder = checkpoint_to_return_to(
            error,
            step=self.step,
            checkpoints=self._run.checkpoints,
            settings=self._config.faults,
            ledger=self._faults,
        )
        await self._collector.restart(step_of(folder))
        await self._engine.abort()
        truncate_metrics(self._run.folder, step_of(folder))
        self._before_step = None
        self._guard.reset()
        await self._load(folder, load_state(folder))

    async def _load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Take up all of a checkpoint but where its rollouts come from."""
        await self._state.load(folder, state)
        self.step = self._faults.step = step_of(folder)
        self._checkpoints.start_from(self.step)
        await self.publish()

    async def publish(self) -> None:
        """Give the learner's weights to the engine, as the policy version of this step."""
        await self._publisher.publish(self._learner, self._engine, version=self.step)
        self._collector.advance(self.step)

    @property
    def saving(self) -> bool:
        """Whether it is at what would be lost if it were cut: new weights, or a checkpoint."""
        return self._checkpoints.busy or self._phases.current in ("update", "publish", "checkpoint")

    def request_stop(self, reason: str) -> None:
        """Ask the run to end after the last finished step (called from a signal handler).

        Generation is cancelled; an update gives up if it has not changed a weight yet; anything
        else takes a moment and is waited for.
        """
        if self._stop_reason is not None:
            return
        self._stop_reason = reason
        if self._phases.current == "update":
            for part in (self._learner, self._critic):
                if part is not None:
                    task = asyncio.get_running_loop().create_task(part.abort())
                    self._background.add(task)
        elif self._phases.current in _AT_REST and self._step_task is not None:
            self._step_task.cancel()

    async def _cancellable(self, step: Any) -> None:
        """Run one step as a task that `request_stop` can end."""
        self._step_task = asyncio.get_running_loop().create_task(step)
        try:
            await self._step_task
        except asyncio.CancelledError:
            if self._stop_reason is None:
                raise
            await self._collector.close()
            await self._engine.abort()
        except RunInterrupted:
            if self._stop_reason is None:
                raise
        finally:
            self._step_task = None

    def _timed(self, phase: str) -> AbstractContextManager[None]:
        return self._phases.timed(phase, step=self.step)
