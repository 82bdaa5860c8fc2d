"""`train(config)`: checks everything, starts the workers, runs the loop, cleans up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.core import sizes
from rlx.core.config import LearnerConfig, RunConfig
from rlx.core.engine import workers
from rlx.core.engine.async_collector import AsyncCollector
from rlx.core.engine.collector import Collection, Collector, GroupMaker
from rlx.core.engine.critic import Critic
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.evaluation import Evaluator, limits_of
from rlx.core.engine.evaluations import Evaluations
from rlx.core.engine.interfaces import Sampling
from rlx.core.engine.learner_group import LearnerGroup, StartingWeights
from rlx.core.engine.monitor import Monitor, Source
from rlx.core.engine.prepare import Plan, prepare
from rlx.core.engine.publication import Publisher
from rlx.core.engine.replay import NoEngine, NoPublisher, Replay
from rlx.core.engine.rewards import RewardRunner
from rlx.core.engine.runtime import Worker, WorkerSpec
from rlx.core.engine.session import Session, TrainResult
from rlx.core.engine.trace import BusyClock
from rlx.core.engine.trainer import Trainer
from rlx.core.models import resolve_model, vocabulary_hash
from rlx.core.plugins import PluginSystem
from rlx.core.run import (
    Run,
    write_manifest,
)
from rlx.core.samplers import BoundSampler


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
    reference: LearnerGroup | StartingWeights | None
    critic: Critic | None
    engines: RolloutEngines | None
    """None: the rollouts are recorded ones."""
    publisher: Publisher | NoPublisher
    rewards: RewardRunner


class _Session(Session):
    """Training by reinforcement learning."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            plan.config,
            selected=plan.selection,
            trackers=plan.selection.trackers,
            plugins=plan.plugins,
            checkpoint=plan.checkpoint,
        )
        self._plan = plan

    async def _work(self, run: Run) -> str:
        parts = await self._start_workers()
        try:
            return await self._train(run, parts)
        finally:
            parts.publisher.close()

    async def _train(self, run: Run, parts: _Parts) -> str:
        self._write_manifest(self._crew.facts)
        plan, config = self._plan, self._config
        trainer = Trainer(
            run=run,
            config=config,
            collector=self._collector(parts.engines, parts.rewards),
            evaluations=self._evaluations(run, parts.engines, parts.rewards),
            estimator=plan.selection.estimator.resolve(),
            learner=parts.learner,
            reference=parts.reference,
            critic=parts.critic,
            engine=parts.engines or NoEngine(),
            publisher=parts.publisher,
            reporter=self._reporter,
            monitor=self._monitor(parts),
            plugins=plan.plugins,
            faults=self._crew.faults,
            needs_old_logprobs=workers.needs_old_logprobs(config, plan.selection.requires),
            reward_weights=parts.rewards.weights,
            decode=plan.tokenizer.decode,
        )
        if plan.resume and self._checkpoint is None:
            self._reporter.status("no checkpoint was written yet: starting from the beginning")
        if self._checkpoint is not None:
            self._reporter.status(f"resuming from {self._checkpoint.name}")
            await trainer.resume(self._checkpoint)
        elif config.learner.lora.quantization:
            await trainer.publish()  # the engine has not the weights that were rounded to 4 bits
        self._trainer = trainer
        self._reporter.status("training")
        reason = await trainer.train()
        if trainer.step >= config.steps:
            await self._finish(parts.learner, trainer)
        return reason

    def _monitor(self, parts: _Parts) -> Monitor:
        sources: list[Source] = [self._crew.memory]
        if parts.engines is not None:
            parts.engines.watch(self._trace)
            sources.append(parts.engines.take_metrics)
        parts.rewards.watch(BusyClock(self._trace, "rewards"))
        return Monitor(self._trace, sources)

    async def _finish(self, learner: LearnerGroup, trainer: Trainer) -> None:
        if self._config.checkpoint.export:
            self._reporter.status("exporting the model")
            await learner.export(str(self._folder / "export"))
        self._mark_finished(trainer)

    def _collector(self, engines: RolloutEngines | None, rewards: RewardRunner) -> Collection:
        plan, config = self._plan, self._config
        if engines is None:
            assert config.replay is not None
            return Replay(config.replay, vocabulary=plan.info.vocab_size)
        sampler = BoundSampler(
            plan.selection.sampler.resolve(),
            plan.tasks.tasks,
            config.seed,
            shuffle=config.data.shuffle,
        )
        maker = GroupMaker(
            client=engines,
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
        if not config.rollout.max_staleness:
            return Collector(maker=maker, scorer=rewards, sampler=sampler)
        return AsyncCollector(
            maker=maker, scorer=rewards, sampler=sampler, client=engines, settings=config.rollout
        )

    def _evaluations(
        self, run: Run, engines: RolloutEngines | None, rewards: RewardRunner
    ) -> Evaluations | None:
        plan = self._plan
        if plan.evaluation is None or engines is None:
            return None
        evaluator = Evaluator(
            plan.evaluation,
            client=engines,
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
        engine_specs = [] if replayed else self._engine_specs()
        specs = [*learner_specs, *engine_specs, *reference_specs, *critic_specs, *reward_specs]
        started = await self._crew.start(specs)

        def group(specs: list[WorkerSpec], settings: LearnerConfig) -> LearnerGroup:
            return LearnerGroup(
                [started[spec.name] for spec in specs],
                settings,
                config.seed,
                depot=self._crew.depot,
            )

        critic = None
        if critic_specs:
            critic = Critic(group(critic_specs, workers.critic_settings(config)), config.critic)
        learner = group(learner_specs, config.learner)
        reference: LearnerGroup | StartingWeights | None = None
        if reference_specs:
            reference = group(reference_specs, config.learner)
        elif workers.needs_reference(config, plan.selection.requires):
            reference = StartingWeights(learner)
        return _Parts(
            learner=learner,
            reference=reference,
            critic=critic,
            engines=None if replayed else self._engines(engine_specs, started),
            publisher=NoPublisher() if replayed else self._publisher(engine_specs),
            rewards=self._crew.reward_runner(reward_specs, started),
        )

    def _critic_specs(self) -> list[WorkerSpec]:
        plan, config = self._plan, self._config
        model = resolve_model(config.critic.model) if config.critic.model else plan.model
        return workers.critic_specs(config, model, plan.selection)

    def _reference_specs(self) -> list[WorkerSpec]:
        plan, config = self._plan, self._config
        if not workers.needs_reference_model(config, plan.selection.requires):
            return []
        model = resolve_model(config.kl.reference) if config.kl.reference else plan.model
        return [workers.reference_spec(config, model, dtype=plan.dtype)]

    def _engines(self, specs: list[WorkerSpec], started: Mapping[str, Worker]) -> RolloutEngines:
        crew = self._crew
        return workers.rollout_engines(
            self._config, crew.settled(specs), started, renew=crew.engine_renewal()
        )

    def _publisher(self, specs: list[WorkerSpec]) -> Publisher:
        return Publisher(
            self._config.publication,
            transport=self._crew.settled(specs)[0].kwargs["transport"],
            receivers=workers.receivers(self._config),
        )

    def _engine_specs(self) -> list[WorkerSpec]:
        plan, config = self._plan, self._config
        dtype = plan.dtype if config.rollout.dtype == "auto" else config.rollout.dtype
        most = sizes.kv_gib_of_a_step(
            config,
            plan.info,
            dtype=dtype,
            sequence_tokens=plan.sequence_tokens,
            context_length=plan.context_length,
        )
        if most is not None and most < config.rollout.kv_cache_gib:
            rollout = config.rollout.model_copy(update={"kv_cache_gib": most})
            config = config.model_copy(update={"rollout": rollout})
        return workers.engine_specs(
            config, plan.model, context_length=plan.context_length, dtype=dtype
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
                "tokenizer": vocabulary_hash(self._plan.tokenizer),
                "tasks": len(self._plan.tasks.tasks),
                "prompts_too_long": self._plan.tasks.skipped_too_long,
                "origins": dict(self._plan.origins),
            },
        )
