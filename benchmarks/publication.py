"""Seconds and GiB/s from the learner's weights to an engine that samples with them.

    python -m benchmarks.publication [embedded smollm2] [--rounds 6]

A learner and an engine in processes of their own (Ray), as in a run; each transport publishes
several times. The first time connects and maps memory, the median is of the others. Prints a
Markdown table (docs/performance.md holds one). SmolLM2 is fetched by benchmarks.prepare_smollm2.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.measuring import warn_if_busy
from rlx.core.config import LearnerConfig, PublicationConfig, RolloutConfig, RuntimeConfig
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.publication import Publisher
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.engine.workers import free_port
from rlx.core.models import resolve_model
from rlx.core.objective import ObjectiveSettings
from rlx.core.references import ComponentRef

MODELS = {"embedded": "embedded", "smollm2": "models/smollm2-135m-instruct"}
ENGINES = ("vllm", "transformers")
TRANSPORTS = ("shared_memory", "gloo")
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One transport between one pair of processes."""

    first: float
    """Seconds of the first publication, with connecting."""
    median: float
    """Seconds of the others."""
    gib: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=DTYPES)
    parser.add_argument("--engines", nargs="*", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    warn_if_busy()
    print("| model | dtype | engine | transport | GiB | first, s | then, s | GiB/s |")
    print("|---|---|---|---|---|---|---|---|")
    for model in arguments.models:
        for dtype in arguments.dtypes:
            for engine in arguments.engines:
                found = asyncio.run(measure(MODELS[model], dtype, engine, arguments.rounds))
                for transport, result in found.items():
                    print(
                        f"| {model} | {dtype} | {engine} | {transport} | {result.gib:.3f} "
                        f"| {result.first:.2f} | {result.median:.3f} "
                        f"| {result.gib / result.median:.2f} |",
                        flush=True,
                    )


async def measure(model: str, dtype: str, engine: str, rounds: int) -> dict[str, Result]:
    """Publish `rounds` times with each transport."""
    runtime = RayRuntime(RuntimeConfig(), logs=None, workers=2)
    threads = len(os.sched_getaffinity(0))
    env = {"OMP_NUM_THREADS": str(threads)}
    folder = resolve_model(model)
    settings = LearnerConfig.model_validate({"dtype": dtype})
    try:
        await asyncio.to_thread(runtime.connect)
        ranks = [
            await runtime.start(
                WorkerSpec(
                    name="learner-0",
                    target="rlx.core.engine.learner.learner:PolicyLearner",
                    kwargs=learner_arguments(folder, settings, threads),
                    env=env,
                )
            )
        ]
        generator = await runtime.start(
            WorkerSpec(
                name="engine-0",
                target=f"rlx.core.engine.rollout.{engine}_engine:{engine.title()}Engine",
                kwargs={
                    "model": folder,
                    "settings": RolloutConfig.model_validate({"max_running": 16}),
                    "context_length": 256,
                    "dtype": dtype,
                    "threads": threads,
                },
                env=env,
            )
        )
        await asyncio.gather(*(worker.call("start") for worker in [*ranks, generator]))
        learner = LearnerGroup(ranks, settings, 0)
        engines = RolloutEngines([RolloutClient(generator)])
        return {way: await publish(learner, engines, way, rounds) for way in TRANSPORTS}
    finally:
        await runtime.close()


async def publish(
    learner: LearnerGroup, engines: RolloutEngines, transport: str, rounds: int
) -> Result:
    publisher = Publisher(PublicationConfig(), transport=transport, receivers=1)
    seconds, gib = [], 0.0
    for version in range(rounds):
        await publisher.publish(learner, engines, version=version)
        seconds.append(publisher.metrics()["publish/seconds"])
        gib = publisher.metrics()["publish/gib"]
    return Result(first=seconds[0], median=statistics.median(seconds[1:]), gib=gib)


def learner_arguments(model: str, settings: LearnerConfig, threads: int) -> dict[str, Any]:
    return {
        "model": model,
        "settings": settings,
        "objective": ObjectiveSettings(
            aggregation="token_mean",
            kl_coef=0.0,
            kl_estimator="k3",
            kl_in_loss=True,
            entropy_coef=0.0,
            sequence_norm=32,
            old_from_rollout=False,
        ),
        "loss": ComponentRef(kind="losses", name="ppo", target="rlx.plugins.losses.ppo:ppo"),
        "correction": ComponentRef(
            kind="corrections", name="tis", target="rlx.plugins.corrections.tis:tis"
        ),
        "temperature": 1.0,
        "total_updates": 1,
        "rank": 0,
        "world": 1,
        "master_port": free_port(),
        "threads": threads,
        "seed": 0,
    }


if __name__ == "__main__":
    main()
