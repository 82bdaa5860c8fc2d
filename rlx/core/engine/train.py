"""`train(config)`: checks everything, starts the workers, runs the loop, cleans up."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.core.config import LearnerConfig, RunConfig
from rlx.core.engine import workers
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.collector import Collector, GroupMaker
from rlx.core.engine.crew import Crew
from rlx.core.engine.critic import Critic
from rlx.core.engine.evaluation import Evaluator, limits_of
from rlx.core.engine.evaluations import Evaluations
from rlx.core.engine.interfaces import Sampling
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.prepare import Plan, prepare
from rlx.core.engine.processes import end_descendants
from rlx.core.engine.publication import Publisher
from rlx.core.engine.reaper import start_reaper, stop_reaper
from rlx.core.engine.replay import NoEngine, NoPublisher, Replay
from rlx.core.engine.reporting import Reporter
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.engine.trainer import Trainer
from rlx.core.models import resolve_model
from rlx.core.plugins import PluginSystem
from rlx.core.run import (
    CONFIG_NAME,
    FINISHED_NAME,
    Run,
    make_folder,
    truncate_metrics,
    write_json,
    write_manifest,
)
from rlx.core.samplers import BoundSampler
from rlx.core.settings import dump_yaml

_STOP_SECONDS = 9.0
"""After this long an interrupted run ends whatever it is waiting for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run leaves behind."""

    folder: Path
    steps: int
    metrics: Mapping[str, float]
    """Of the last step."""
    reason: str
    signal: int | None = None
    """The signal that ended the run, if one did."""


def train(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    resume: bool = False,
    origins: Mapping[str, str] | None = None,
) -> TrainResult:
    """Train as `config` says and return when the run has ended.

    Raises:
        UsageError: for a mistake in the configuration or the data, before anything is started.
        ComponentError: when a component failed; the last finished step is then in a checkpoint.
        EngineError: when a worker failed.
    """
    plan = prepare(config, plugins=plugins, resume=resume, origins=origins)
    return asyncio.run(_Session(plan).run())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """What runs in the workers of a run."""

    learner: LearnerGroup
    reference: LearnerGroup | None
    critic: Critic | None
    engine: RolloutClient | None
    """None: the rollouts are recorded ones."""
    rewards: RewardRunner


class _Session:
    """One run from its folder to its last process."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._config = plan.config
        assert plan.config.output is not None
        self._folder = plan.config.output.resolve()
        self._reporter = Reporter([ref.resolve() for ref in plan.selection.trackers])
        self._crew = Crew(
            plan.config,
            plan.selection,
            plugins=plan.plugins,
            folder=self._folder,
            status=self._reporter.status,
        )
        self._trainer: Trainer | None = None
        self._main: asyncio.Task[Any] | None = None
        self._signal: int | None = None
        self._deadline: threading.Timer | None = None

    async def run(self) -> TrainResult:
        self._prepare_folder()
        run = Run(
            name=self._folder.name,
            folder=self._folder,
            config=self._config,
            start_step=_step(self._plan.checkpoint),
        )
        self._watch_signals()
        error: BaseException | None = None
        self._reporter.start(run)
        publisher = Publisher() if self._config.replay is None else NoPublisher()
        reaper = start_reaper()
        try:
            self._plan.plugins.notify("rlx_on_run_start", run=run)
            self._main = asyncio.ensure_future(self._train(run, publisher))
            reason = await self._main
            return self._result(reason)
        except asyncio.CancelledError:
            if self._signal is None:
                raise
            return self._result(_signal_name(self._signal))
        except BaseException as caught:
            error = caught
            raise
        finally:
            publisher.close()
            await self._crew.close()
            stop_reaper(reaper)
            self._reporter.close(error)
            self._plan.plugins.notify("rlx_on_run_end", run=run, error=error)
            if self._deadline is not None:
                self._deadline.cancel()

    def _result(self, reason: str) -> TrainResult:
        trainer = self._trainer
        return TrainResult(
            folder=self._folder,
            steps=trainer.step if trainer else _step(self._plan.checkpoint),
            metrics=trainer.metrics if trainer else {},
            reason=reason,
            signal=self._signal,
        )

    def _prepare_folder(self) -> None:
        make_folder(self._folder)
        (self._folder / FINISHED_NAME).unlink(missing_ok=True)
        (self._folder / CONFIG_NAME).write_text(dump_yaml(self._config))
        checkpoint = self._plan.checkpoint
        truncate_metrics(self._folder, _step(checkpoint) if checkpoint else -1)

    async def _train(self, run: Run, publisher: Publisher | NoPublisher) -> str:
        parts = await self._start_workers()
        self._write_manifest(self._crew.facts)
        plan, config = self._plan, self._config
        trainer = Trainer(
            run=run,
            config=config,
            collector=self._collector(parts.engine, parts.rewards),
            evaluations=self._evaluations(run, parts.engine, parts.rewards),
            estimator=plan.selection.estimator.resolve(),
            learner=parts.learner,
            reference=parts.reference,
            critic=parts.critic,
            engine=parts.engine or NoEngine(),
            publisher=publisher,
            reporter=self._reporter,
            plugins=plan.plugins,
            needs_old_logprobs=workers.needs_old_logprobs(config, plan.selection.requires),
            reward_weights=parts.rewards.weights,
            decode=plan.tokenizer.decode,
        )
        if plan.resume and plan.checkpoint is None:
            self._reporter.status("no checkpoint was written yet: starting from the beginning")
        if plan.checkpoint is not None:
            self._reporter.status(f"resuming from {plan.checkpoint.name}")
            await trainer.resume(plan.checkpoint)
        self._trainer = trainer
        self._reporter.status("training")
        reason = await trainer.train()
        if trainer.step >= config.steps:
            await self._finish(parts.learner, trainer)
        return reason

    async def _finish(self, learner: LearnerGroup, trainer: Trainer) -> None:
        if self._config.checkpoint.export:
            self._reporter.status("exporting the model")
            await learner.export(str(self._folder / "export"))
        write_json(self._folder / FINISHED_NAME, {"step": trainer.step, "metrics": trainer.metrics})

    def _collector(self, engine: RolloutClient | None, rewards: RewardRunner) -> Collector | Replay:
        plan, config = self._plan, self._config
        if engine is None:
            assert config.replay is not None
            return Replay(config.replay, vocabulary=plan.info.vocab_size)
        sampler = BoundSampler(
            plan.selection.sampler.resolve(),
            plan.tasks.tasks,
            config.seed,
            shuffle=config.data.shuffle,
        )
        maker = GroupMaker(
            client=engine,
            agent=plan.selection.agent.resolve(),
            scorer=rewards,
            tokenizer=plan.tokenizer,
            sampling=Sampling(
                max_new_tokens=config.rollout.max_new_tokens,
                temperature=config.rollout.temperature,
                top_p=config.rollout.top_p,
                top_k=config.rollout.top_k,
            ),
            limits=limits_of(config, plan.context_length),
            group_size=config.rollout.group_size,
            seed=config.seed,
            greedy=bool(plan.selection.estimator.resolve().tags.extra.get("greedy")),
        )
        return Collector(maker=maker, scorer=rewards, sampler=sampler)

    def _evaluations(
        self, run: Run, engine: RolloutClient | None, rewards: RewardRunner
    ) -> Evaluations | None:
        plan = self._plan
        if plan.evaluation is None or engine is None:
            return None
        evaluator = Evaluator(
            plan.evaluation,
            client=engine,
            selection=plan.selection,
            scorer=rewards,
            tokenizer=plan.tokenizer,
            limits=limits_of(plan.config, plan.context_length),
        )
        return Evaluations(evaluator, run=run, reporter=self._reporter, plugins=plan.plugins)

    async def _start_workers(self) -> _Parts:
        plan, config = self._plan, self._config
        learner_specs = workers.learner_specs(config, plan.model, plan.selection, dtype=plan.dtype)
        replayed = config.replay is not None
        reward_specs = [] if replayed else workers.reward_specs(config, plan.selection)
        reference_specs = self._reference_specs()
        critic_specs = self._critic_specs()
        engine_spec = workers.engine_spec(
            config, plan.model, context_length=plan.context_length, dtype=self._engine_dtype()
        )
        generators = [] if replayed else [engine_spec]
        specs = [*learner_specs, *generators, *reference_specs, *critic_specs, *reward_specs]
        started = await self._crew.start(specs)

        def group(specs: list[WorkerSpec], settings: LearnerConfig) -> LearnerGroup:
            return LearnerGroup([started[spec.name] for spec in specs], settings, config.seed)

        critic = None
        if critic_specs:
            critic = Critic(group(critic_specs, workers.critic_settings(config)), config.critic)
        return _Parts(
            learner=group(learner_specs, config.learner),
            reference=group(reference_specs, config.learner) if reference_specs else None,
            critic=critic,
            engine=None if replayed else RolloutClient(started["engine"]),
            rewards=self._crew.reward_runner(reward_specs, started),
        )

    def _critic_specs(self) -> list[WorkerSpec]:
        plan, config = self._plan, self._config
        model = resolve_model(config.critic.model) if config.critic.model else plan.model
        return workers.critic_specs(config, model, plan.selection)

    def _reference_specs(self) -> list[WorkerSpec]:
        plan, config = self._plan, self._config
        if not workers.needs_reference(config, plan.selection.requires):
            return []
        model = resolve_model(config.kl.reference) if config.kl.reference else plan.model
        return [workers.reference_spec(config, model, dtype=plan.dtype)]

    def _engine_dtype(self) -> str:
        return (
            self._plan.dtype if self._config.rollout.dtype == "auto" else self._config.rollout.dtype
        )

    def _write_manifest(self, facts: Mapping[str, Any]) -> None:
        write_manifest(
            self._folder,
            config=self._config,
            components=self._plan.selection.manifest(),
            plugins=self._plan.plugins.manifest(self._plan.selection.components),
            facts={
                **facts,
                "sources": [source.describe() for source in self._plan.tasks.sources],
                "evaluation": [
                    source.describe()
                    for source in (self._plan.evaluation.sources if self._plan.evaluation else ())
                ],
                "tasks": len(self._plan.tasks.tasks),
                "prompts_too_long": self._plan.tasks.skipped_too_long,
                "origins": dict(self._plan.origins),
            },
        )

    def _watch_signals(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        """First signal: end in order. A second one, or the deadline: end at once."""
        if self._signal is not None:
            _end_now(number)
        self._signal = number
        self._reporter.status(f"{_signal_name(number)}: ending after the last finished step")
        self._deadline = threading.Timer(_STOP_SECONDS, _end_now, (number,))
        self._deadline.daemon = True
        self._deadline.start()
        if self._trainer is not None:
            self._trainer.request_stop(_signal_name(number))
        elif self._main is not None:
            self._main.cancel()


def _step(checkpoint: Path | None) -> int:
    from rlx.core.engine.checkpoints import step_of

    return step_of(checkpoint) if checkpoint else 0


def _signal_name(number: int) -> str:
    return (
        "stopped by Ctrl-C"
        if number == signal.SIGINT
        else f"stopped by {signal.Signals(number).name}"
    )


def _end_now(number: int) -> None:
    """Leave without waiting for anything; the last checkpoint on disk is whole."""
    end_descendants()
    os._exit(128 + number)
