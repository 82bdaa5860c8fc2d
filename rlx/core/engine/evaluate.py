"""`rlx eval`: checks everything, starts an engine and the rewards, evaluates once, cleans up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlx.core.config import RunConfig
from rlx.core.engine import workers
from rlx.core.engine.client import RolloutClient
from rlx.core.engine.collector import unwrap
from rlx.core.engine.crew import Crew
from rlx.core.engine.evaluation import (
    EvaluationPlan,
    Evaluator,
    Progress,
    limits_of,
    plan_evaluation,
)
from rlx.core.engine.prepare import load_tokenizer
from rlx.core.engine.processes import end_descendants
from rlx.core.errors import RunInterrupted
from rlx.core.evaluation import Evaluation
from rlx.core.models import ModelInfo, model_info, resolve_model
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import EVAL_RULES, check
from rlx.core.preflight_case import Finding
from rlx.core.run import CONFIG_NAME, Run, library_versions, write_json
from rlx.core.selection import Selection, select
from rlx.core.settings import dump_yaml

RESULTS_NAME = "results.json"
SAMPLES_NAME = "samples.jsonl"
_STOP_SECONDS = 9.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    """Everything that is known before the engine starts."""

    config: RunConfig
    selection: Selection
    plugins: PluginSystem
    model: str
    info: ModelInfo
    tokenizer: Any
    plan: EvaluationPlan
    context_length: int
    warnings: tuple[Finding, ...]


def prepare_evaluation(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    origins: Mapping[str, str] | None = None,
) -> EvalJob:
    """Check names, parameters, sizes and the data; start nothing. Raises UsageError."""
    plugins = plugins or PluginSystem.load(
        disable=config.plugins.disable, required=config.plugins.required
    )
    selection = select(config, plugins, origins=origins)
    model = resolve_model(config.model)
    info = model_info(model)
    findings = check(config, selection, info, origins=origins, rules=EVAL_RULES)
    plugins.control("rlx_configure", config=config)
    context = min(info.context_length, config.rollout.context_length or info.context_length)
    tokenizer = load_tokenizer(model, config.data)
    plan = plan_evaluation(config, selection, tokenizer=tokenizer, context_length=context)
    if config.rollout.context_length is None and config.data.max_prompt_tokens is not None:
        context = min(context, config.data.max_prompt_tokens + plan.sampling.max_new_tokens)
    return EvalJob(
        config=config,
        selection=selection,
        plugins=plugins,
        model=model,
        info=info,
        tokenizer=tokenizer,
        plan=plan,
        context_length=context,
        warnings=tuple(findings),
    )


def evaluate(
    job: EvalJob,
    folder: Path,
    *,
    step: int = 0,
    status: Callable[[str], None] = lambda _: None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate and write `results.json`, `samples.jsonl` and `config.yaml` into `folder`.

    Args:
        step: the training step that the model is of; 0 for a model of its own.
        status: told what is being waited for.
        progress: told how many tasks are done.

    Raises:
        ComponentError: a reward failed under the policy `raise`, or the agent failed.
        EngineError: a worker failed.
        RunInterrupted: Ctrl-C or SIGTERM.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(dump_yaml(job.config), encoding="utf-8")
    evaluation = asyncio.run(_run(job, folder, status, progress))
    write_json(folder / RESULTS_NAME, results_of(job, evaluation, step))
    with (folder / SAMPLES_NAME).open("w", encoding="utf-8") as file:
        for record in evaluation.records():
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    run = Run(name=folder.name, folder=folder, config=job.config, start_step=step)
    job.plugins.notify("rlx_on_eval_end", run=run, step=step, results=evaluation.metrics)
    return evaluation


def results_of(job: EvalJob, evaluation: Evaluation, step: int) -> dict[str, Any]:
    """What `results.json` holds; a number that is not finite is null."""
    plan = job.plan
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": job.config.model,
        "step": step,
        "settings": {
            "samples": plan.samples,
            "part": plan.scoring.part,
            "threshold": plan.scoring.threshold,
            **asdict(plan.sampling),
            "engine": job.config.rollout.engine,
            "seed": job.config.seed,
        },
        "sources": {
            source.name: {
                **{
                    "pass@k" if key == "pass_at" else key: _finite(value)
                    for key, value in asdict(evaluation.sources[source.name]).items()
                },
                "prompts_too_long": source.skipped_too_long,
            }
            for source in plan.sources
        },
        "failed_rewards": evaluation.failed_rewards,
        "seconds": evaluation.seconds,
        "versions": library_versions(),
    }


async def _run(
    job: EvalJob, folder: Path, status: Callable[[str], None], progress: Progress | None
) -> Evaluation:
    signals: list[int] = []
    timers = _cancel_on_signal(signals)
    crew = Crew(job.config, job.selection, plugins=job.plugins, folder=folder, status=status)
    try:
        return await _evaluate(job, crew, status, progress)
    except asyncio.CancelledError:
        if signals:
            raise RunInterrupted(f"stopped by {signal.Signals(signals[0]).name}") from None
        raise
    except BaseExceptionGroup as group:
        raise unwrap(group) from None
    finally:
        await crew.close()
        for timer in timers:
            timer.cancel()


async def _evaluate(
    job: EvalJob, crew: Crew, status: Callable[[str], None], progress: Progress | None
) -> Evaluation:
    config = job.config
    reward_specs = workers.reward_specs(config, job.selection)
    dtype = job.info.dtype if config.learner.dtype == "auto" else config.learner.dtype
    engine_spec = workers.engine_spec(
        config,
        job.model,
        context_length=job.context_length,
        dtype=dtype if config.rollout.dtype == "auto" else config.rollout.dtype,
    )
    started = await crew.start([engine_spec, *reward_specs])
    rewards = crew.reward_runner(reward_specs, started)
    evaluator = Evaluator(
        job.plan,
        client=RolloutClient(started["engine"]),
        selection=job.selection,
        scorer=rewards,
        tokenizer=job.tokenizer,
        limits=limits_of(config, job.context_length),
    )
    status("evaluating")
    return await evaluator.evaluate(progress)


def _cancel_on_signal(signals: list[int]) -> list[threading.Timer]:
    """The first Ctrl-C or SIGTERM ends in order; a second one, or the deadline, at once."""
    timers: list[threading.Timer] = []
    if threading.current_thread() is not threading.main_thread():
        return timers
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None

    def on_signal(number: int) -> None:
        if signals:
            _end_now(number)
        signals.append(number)
        timer = threading.Timer(_STOP_SECONDS, _end_now, (number,))
        timer.daemon = True
        timer.start()
        timers.append(timer)
        main.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return timers


def _end_now(number: int) -> None:
    end_descendants()
    os._exit(128 + number)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return value
