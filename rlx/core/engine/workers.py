"""Which workers a run needs, and how each is made. No model is loaded here."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.config import RunConfig
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.objective import ObjectiveSettings
from rlx.core.selection import Selection

_ENGINES = {
    "vllm": "rlx.core.engine.rollout.vllm_engine:VllmEngine",
    "transformers": "rlx.core.engine.rollout.transformers_engine:TransformersEngine",
}
_LEARNER = "rlx.core.engine.learner.learner:PolicyLearner"
_SCORER = "rlx.core.engine.learner.scorer:Scorer"
_REWARDS = "rlx.core.engine.rewards:RewardWorker"


def threads_of(config: RunConfig) -> int:
    """CPU threads of a phase: phases take turns, so each gets all cores."""
    return config.runtime.cpus or len(os.sched_getaffinity(0))


def engine_spec(config: RunConfig, model: str, *, context_length: int, dtype: str) -> WorkerSpec:
    threads = threads_of(config)
    return WorkerSpec(
        name="engine",
        target=_ENGINES[config.rollout.engine],
        kwargs={
            "model": model,
            "settings": config.rollout,
            "context_length": context_length,
            "dtype": dtype,
            "seed": config.seed,
            "threads": threads,
        },
        env=_thread_env(threads),
    )


def learner_specs(
    config: RunConfig, model: str, selection: Selection, *, dtype: str
) -> list[WorkerSpec]:
    """One spec for each rank."""
    ranks = config.learner.ranks
    threads = max(threads_of(config) // ranks, 1)
    port = free_port()
    common = {
        "model": model,
        "settings": config.learner.model_copy(update={"dtype": dtype}),
        "objective": objective_settings(config, selection),
        "loss": selection.loss,
        "correction": selection.correction,
        "temperature": config.rollout.temperature,
        "total_updates": config.steps * config.updates_per_step,
        "world": ranks,
        "master_port": port,
        "threads": threads,
        "seed": config.seed,
    }
    return [
        WorkerSpec(
            name=f"learner-{rank}",
            target=_LEARNER,
            kwargs={**common, "rank": rank},
            env=_thread_env(threads),
        )
        for rank in range(ranks)
    ]


def reference_spec(config: RunConfig, model: str, *, dtype: str) -> WorkerSpec:
    threads = threads_of(config)
    return WorkerSpec(
        name="reference",
        target=_SCORER,
        kwargs={
            "model": model,
            "settings": config.learner.model_copy(update={"dtype": dtype}),
            "temperature": config.rollout.temperature,
            "threads": threads,
        },
        env=_thread_env(threads),
    )


def reward_specs(config: RunConfig, selection: Selection) -> list[WorkerSpec]:
    return [
        WorkerSpec(
            name=f"rewards-{number}",
            target=_REWARDS,
            kwargs={
                "rewards": selection.rewards,
                "concurrency": config.reward.concurrency,
                "timeout": config.reward.timeout,
            },
            env=_thread_env(1),
            cpus=0.0,
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


def needs_old_logprobs(config: RunConfig, requires: Sequence[str] | frozenset[str]) -> bool:
    """Whether the learner must score the batch before it trains on it.

    One on-policy update makes the pass redundant: its own forward gives the same numbers.
    """
    mode = config.algorithm.old_logprobs
    if mode == "recompute" or "old_logprobs" in requires:
        return True
    kl_needs_them = config.kl.coef > 0 and config.kl.placement == "reward"
    return mode == "auto" and (config.updates_per_step > 1 or kl_needs_them)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _thread_env(threads: int) -> Mapping[str, Any]:
    return {"OMP_NUM_THREADS": str(threads)}
