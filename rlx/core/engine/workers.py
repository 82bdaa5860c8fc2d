"""Which workers a run needs, and how each is made. No model is loaded here."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.config import LearnerConfig, RunConfig
from rlx.core.engine.client import Renew, RolloutClient
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.kept_memory import KEPT_MEMORY
from rlx.core.engine.runtime import Worker, WorkerSpec
from rlx.core.objective import ObjectiveSettings
from rlx.core.offline.selection import OfflineSelection
from rlx.core.selection import Selection
from rlx.core.value_loss import ValueSettings

_ENGINES = {
    "vllm": "rlx.core.engine.rollout.vllm_engine:VllmEngine",
    "transformers": "rlx.core.engine.rollout.transformers_engine:TransformersEngine",
}
_CRITIC = "rlx.core.engine.learner.value_learner:ValueLearner"
_LEARNER = "rlx.core.engine.learner.learner:PolicyLearner"
_OBJECTIVE_LEARNER = "rlx.core.engine.learner.objective_learner:ObjectiveLearner"
_LOGIT_LEARNER = "rlx.core.engine.learner.logit_learner:LogitLearner"
_SCORER = "rlx.core.engine.learner.scorer:Scorer"
_REWARDS = "rlx.core.engine.rewards:RewardWorker"
_GRACE = 30.0
"""Seconds beyond a reward's time-out after which a worker that doesn't answer counts as lost."""


def threads_of(config: RunConfig) -> int:
    """CPU threads of a phase: all cores, because phases take turns; half of them where generation
    goes on while the learner trains."""
    cpus = config.runtime.cpus or len(os.sched_getaffinity(0))
    return max(cpus // 2, 1) if config.rollout.max_staleness else cpus


def engine_specs(
    config: RunConfig, model: str, *, context_length: int, dtype: str
) -> list[WorkerSpec]:
    """One spec for each rollout engine; they work at the same time and share the cores."""
    engines = config.rollout.engines
    threads = max(threads_of(config) // engines, 1)
    return [
        WorkerSpec(
            name=f"engine-{number}",
            role="rollout",
            rank=number,
            world=engines,
            target=_ENGINES[config.rollout.engine],
            kwargs={
                "model": model,
                "settings": config.rollout,
                "context_length": context_length,
                "dtype": dtype,
                "seed": config.seed,
                "threads": threads,
                "transport": config.publication.transport,
            },
            env=_thread_env(threads),
            gpus=config.rollout.tensor_parallel,
        )
        for number in range(engines)
    ]


def receivers(config: RunConfig) -> int:
    """Processes that receive weights: the workers of all engines."""
    vllm = config.rollout.engine == "vllm"
    return config.rollout.engines * (config.rollout.tensor_parallel if vllm else 1)


def rollout_engines(
    config: RunConfig,
    specs: Sequence[WorkerSpec],
    started: Mapping[str, Worker],
    *,
    renew: Renew | None,
) -> RolloutEngines:
    """The started engines as one; `renew` starts one that is lost anew."""
    swaps = config.rollout.partial_rollout
    sleeps = all(spec.kwargs.get("sleeps") for spec in specs)
    return RolloutEngines(
        [RolloutClient(started[spec.name], swaps_in_flight=swaps, renew=renew) for spec in specs],
        sleep_level=config.placement.sleep_level if sleeps else 0,
    )


def learner_specs(
    config: RunConfig, model: str, selection: Selection, *, dtype: str
) -> list[WorkerSpec]:
    """One spec for each rank of the policy's learner."""
    trained = config.steps
    if "values" in selection.requires:
        trained -= min(config.critic.warmup_steps, config.steps)
    own = {
        "model": model,
        "settings": config.learner.model_copy(update={"dtype": dtype}),
        "objective": objective_settings(config, selection),
        "loss": selection.loss,
        "correction": selection.correction,
        "temperature": config.rollout.temperature,
        "total_updates": trained * config.updates_per_step,
    }
    return _rank_specs("learner", _LEARNER, config, own, apart=_critic_apart(config, selection))


def objective_specs(
    config: RunConfig,
    model: str,
    selection: OfflineSelection,
    *,
    dtype: str,
    pad: int | None,
    teacher: str | None = None,
) -> list[WorkerSpec]:
    """One spec for each rank of the learner of an offline run.

    Args:
        pad: token that pads, for those who load the trained model.
        teacher: folder of the teacher, where one is required.
    """
    own = {
        "model": model,
        "settings": config.learner.model_copy(update={"dtype": dtype}),
        "objective": selection.objective,
        "pad_token_id": pad,
        "total_updates": config.steps,
    }
    if selection.needs.head != "logits":
        return _rank_specs("learner", _OBJECTIVE_LEARNER, config, own)
    beside = {"teacher": teacher, "teacher_dtype": config.offline.teacher_dtype}
    return _rank_specs("learner", _LOGIT_LEARNER, config, {**own, **beside})


def critic_specs(config: RunConfig, model: str, selection: Selection) -> list[WorkerSpec]:
    """One spec for each rank of the critic's learner; none when nobody requires values.

    Args:
        model: folder that the critic starts from.
    """
    if "values" not in selection.requires:
        return []
    settings = critic_settings(config)
    own = {
        "model": model,
        "settings": settings,
        "objective": ValueSettings(
            aggregation=selection.aggregation,
            sequence_norm=config.rollout.max_new_tokens,
            clip=config.critic.value_clip,
            coefficient=config.critic.coefficient,
        ),
        "total_updates": config.steps * updates_per_step(config, settings),
    }
    apart = _critic_apart(config, selection)
    specs = _rank_specs("critic", _CRITIC, config, own, apart=apart)
    if config.critic.placement == "apart":
        return specs
    return [
        dataclasses.replace(spec, beside=f"learner-{rank}", cpus=0.0)
        for rank, spec in enumerate(specs)
    ]


def critic_settings(config: RunConfig) -> LearnerConfig:
    """The policy learner's settings with the critic's own in their place."""
    critic, learner = config.critic, config.learner
    return learner.model_copy(
        update={
            "lr": critic.lr,
            "max_grad_norm": critic.max_grad_norm,
            "epochs": critic.epochs or learner.epochs,
            "minibatch_size": critic.minibatch_size or learner.minibatch_size,
            "zero_stage": learner.zero_stage if critic.zero_stage is None else critic.zero_stage,
        }
    )


def updates_per_step(config: RunConfig, settings: LearnerConfig) -> int:
    """Optimizer steps per training step of a learner with these settings."""
    size = settings.minibatch_size or config.batch_size
    return settings.epochs * -(-config.batch_size // size)


def _critic_apart(config: RunConfig, selection: Selection) -> bool:
    return "values" in selection.requires and config.critic.placement == "apart"


def _rank_specs(
    name: str, target: str, config: RunConfig, own: Mapping[str, Any], *, apart: bool = False
) -> list[WorkerSpec]:
    """One worker for each rank of a learner, with what is the same for all learners."""
    ranks = config.learner.ranks
    # A critic that is apart trains at the same time as the policy.
    threads = max(threads_of(config) // (2 * ranks if apart else ranks), 1)
    common = {
        "world": ranks,
        "master_port": free_port(),
        "threads": threads,
        "seed": config.seed,
    }
    return [
        WorkerSpec(
            name=f"{name}-{rank}",
            role=name,
            rank=rank,
            world=ranks,
            target=target,
            kwargs={**own, **common, "rank": rank},
            env={**_thread_env(threads), **KEPT_MEMORY},
            gpus=1,
        )
        for rank in range(ranks)
    ]


def reference_spec(
    config: RunConfig, model: str, *, dtype: str, temperature: float | None = None
) -> WorkerSpec:
    """The worker that scores with the reference model; `temperature` unset: the rollouts'."""
    threads = threads_of(config)
    return WorkerSpec(
        name="reference",
        role="scorer",
        target=_SCORER,
        kwargs={
            "model": model,
            "settings": config.learner.model_copy(update={"dtype": dtype}),
            "temperature": temperature or config.rollout.temperature,
            "threads": threads,
        },
        env=_thread_env(threads),
        gpus=1,
    )


def reward_specs(config: RunConfig, selection: Selection) -> list[WorkerSpec]:
    # A reward that holds a model has a phase of its own; others are small and run beside them.
    threads = threads_of(config) if "reward_model" in selection.requires else 1
    return [
        WorkerSpec(
            name=f"rewards-{number}",
            role="reward",
            rank=number,
            world=config.reward.workers,
            target=_REWARDS,
            kwargs={
                "rewards": selection.rewards,
                "concurrency": config.reward.concurrency,
                "timeout": config.reward.timeout,
                "retries": config.reward.retries,
                "backoff": config.reward.retry_backoff,
            },
            env=_thread_env(threads),
            cpus=0.0,
            gpus=int("reward_model" in selection.requires),
            # A reward that holds the interpreter (a regular expression that backtracks without
            # end) stops the worker's own time-outs too; otherwise those keep it going.
            answer_timeout=config.reward.timeout + _GRACE,
            progress_timeout=float("inf"),
        )
        for number in range(config.reward.workers)
    ]


def objective_settings(config: RunConfig, selection: Selection) -> ObjectiveSettings:
    return ObjectiveSettings(
        aggregation=selection.aggregation,
        kl_coef=config.kl.coef,
        kl_estimator=config.kl.estimator,
        kl_in_loss=config.kl.placement == "loss",
        entropy_coef=config.algorithm.entropy_coef,
        sequence_norm=config.rollout.max_new_tokens,
        old_from_rollout=config.algorithm.old_logprobs == "rollout",
    )


def needs_reference(config: RunConfig, requires: Sequence[str] | frozenset[str]) -> bool:
    return config.kl.coef > 0 or "ref_logprobs" in requires


def needs_reference_model(config: RunConfig, requires: Sequence[str] | frozenset[str]) -> bool:
    """Whether the reference is a model of its own, and not the policy without its adapters."""
    return needs_reference(config, requires) and not config.policy_is_reference


def needs_old_logprobs(config: RunConfig, requires: Sequence[str] | frozenset[str]) -> bool:
    """Whether the learner must score the batch before it trains on it.

    One on-policy update makes the pass redundant: its own forward gives the same numbers. Where
    the engine's log-probs stand in, they do so for whoever requires old ones too.
    """
    mode = config.algorithm.old_logprobs
    if mode != "auto":
        return mode == "recompute"
    kl_needs_them = config.kl.coef > 0 and config.kl.placement == "reward"
    return "old_logprobs" in requires or config.updates_per_step > 1 or kl_needs_them


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _thread_env(threads: int) -> Mapping[str, Any]:
    return {"OMP_NUM_THREADS": str(threads)}
