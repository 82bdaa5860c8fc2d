"""`rlx eval`: checks everything, starts an engine and the rewards, evaluates once, cleans up."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlx.core.config import RunConfig
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.evaluation import (
    EvaluationPlan,
    Evaluator,
    Progress,
    limits_of,
    plan_evaluation,
)
from rlx.core.engine.inference import Setup, run_inference, set_up
from rlx.core.engine.rewards import RewardRunner
from rlx.core.evaluation import Evaluation
from rlx.core.plugins import PluginSystem
from rlx.core.preflight import EVAL_RULES
from rlx.core.run import CONFIG_NAME, Run, library_versions, write_json
from rlx.core.settings import dump_yaml

RESULTS_NAME = "results.json"
SAMPLES_NAME = "samples.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalJob:
    """Everything that is known before the engine starts."""

    setup: Setup
    plan: EvaluationPlan

    @property
    def config(self) -> RunConfig:
        return self.setup.config

    @property
    def context_length(self) -> int:
        """Of the engine."""
        return self.setup.needed_context(self.plan.sampling.max_new_tokens)


def prepare_evaluation(
    config: RunConfig,
    *,
    plugins: PluginSystem | None = None,
    origins: Mapping[str, str] | None = None,
) -> EvalJob:
    """Check names, parameters, sizes and the data; start nothing. Raises UsageError."""
    setup = set_up(config, plugins=plugins, origins=origins, rules=EVAL_RULES)
    plan = plan_evaluation(
        config,
        setup.selection,
        tokenizer=setup.tokenizer,
        context_length=setup.context_length,
    )
    return EvalJob(setup=setup, plan=plan)


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

    async def use(engine: RolloutEngines, rewards: RewardRunner) -> Evaluation:
        status("evaluating")
        return await _evaluator(job, engine, rewards).evaluate(progress)

    evaluation = run_inference(
        job.setup, use, context_length=job.context_length, folder=folder, status=status
    )
    write_json(folder / RESULTS_NAME, results_of(job, evaluation, step))
    with (folder / SAMPLES_NAME).open("w", encoding="utf-8", errors="backslashreplace") as file:
        for record in evaluation.records():
            file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
    run = Run(name=folder.name, folder=folder, config=job.config, start_step=step)
    job.setup.plugins.notify("rlx_on_eval_end", run=run, step=step, results=evaluation.metrics)
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


def _evaluator(job: EvalJob, engine: RolloutEngines, rewards: RewardRunner) -> Evaluator:
    return Evaluator(
        job.plan,
        client=engine,
        selection=job.setup.selection,
        scorer=rewards,
        tokenizer=job.setup.tokenizer,
        limits=limits_of(job.config, job.context_length),
    )


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return value
