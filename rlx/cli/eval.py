"""`rlx eval`: how good a model, a run or a checkpoint is on data."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.measure import Measurement
from rich.table import Table

from rlx.cli.common_options import ConfigFiles, Root
from rlx.cli.loading import loaded_plugins
from rlx.cli.output import console, next_step, print_warning
from rlx.cli.sampling_options import (
    Agent,
    Engine,
    MaxNewTokens,
    MaxTasks,
    Rewards,
    Runtime,
    Seed,
    Sets,
    Source,
    flags_of,
)
from rlx.cli.targets import Target, check_new, find_target, numbered_folder
from rlx.cli.waiting import shown
from rlx.core.config import SourceConfig
from rlx.core.run import EVALS_NAME
from rlx.core.settings import Settings, load_settings

if TYPE_CHECKING:
    from rlx.core.engine.evaluate import EvalJob
    from rlx.core.evaluation import Evaluation

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

FLAGS = {
    "model": "model",
    "data": "eval.sources",
    "reward": "rewards",
    "samples": "eval.samples",
    "temperature": "eval.temperature",
    "max_new_tokens": "eval.max_new_tokens",
    "max_tasks": "eval.max_tasks",
    "part": "eval.part",
    "threshold": "eval.threshold",
    "agent": "agent",
    "engine": "rollout.engine",
    "runtime": "runtime.kind",
    "seed": "seed",
}
"""Flag of `rlx eval` → key of the configuration."""


@app.command(epilog="The settings are those of a run: [bold]rlx train --dry-run[/bold] lists them.")
def evaluate(
    source: Source = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", help="Data to evaluate on; repeatable. Unset: eval.sources."),
    ] = None,
    reward: Rewards = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", help="Rollouts per task, for pass@k.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy (default for one sample).")
    ] = None,
    max_new_tokens: MaxNewTokens = None,
    max_tasks: MaxTasks = None,
    part: Annotated[
        str | None, typer.Option("--part", help="Reward whose score counts (default: the first).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option("--threshold", help="Score from which on a rollout passes.")
    ] = None,
    agent: Agent = None,
    engine: Engine = None,
    runtime: Runtime = None,
    seed: Seed = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", help="Folder for results and samples; new or empty."),
    ] = None,
    root: Root = Path("runs"),
    config: ConfigFiles = None,
    set_: Sets = None,
) -> None:
    """Evaluate a model, a run or a checkpoint: mean score and pass@k.

    A run or checkpoint is evaluated with the settings of its run, as during training.
    """
    given = {name: value for name, value in locals().items() if name in FLAGS}
    target = find_target(source, root)
    settings = _settings(target, given, config or [], set_ or [])
    folder = output or numbered_folder(target, settings.config, EVALS_NAME)
    check_new(folder)
    from rlx.core.engine.evaluate import evaluate as run_evaluation
    from rlx.core.engine.evaluate import prepare_evaluation

    plugins = loaded_plugins(settings.config)
    job = prepare_evaluation(settings.config, plugins=plugins, origins=settings.origins)
    for finding in job.setup.warnings:
        print_warning(finding.what, finding.fix)
    with shown() as (status, progress):
        found = run_evaluation(job, folder, step=target.step, status=status, progress=progress)
    _report(job, found, folder, source)


def _settings(
    target: Target, given: dict[str, Any], files: list[Path], sets: list[str]
) -> Settings:
    """The run's settings, files, environment, flags and `--set`, in this order."""
    settings = load_settings(
        files=[*([target.settings] if target.settings else []), *files],
        sets=sets,
        flags={"model": target.model, **flags_of(given)},
        names=FLAGS,
    )
    config = settings.config
    sources = config.eval.sources
    if not sources and config.data.path == "embedded" and not config.data.sources:
        sources = [SourceConfig(path="embedded", split="test")]
    elif not sources:
        print_warning("no evaluation data is given: this is the training data", "--data FILE")
        sources = config.data.sources or [SourceConfig(path=config.data.path)]
    new_tokens = config.eval.max_new_tokens or config.rollout.max_new_tokens
    eval_ = config.eval.model_copy(update={"sources": sources, "max_new_tokens": new_tokens})
    return Settings(
        config=config.model_copy(update={"eval": eval_}),
        origins=settings.origins,
    )


def _report(job: EvalJob, found: Evaluation, folder: Path, source: str | None) -> None:
    from rlx.core.engine.evaluate import RESULTS_NAME, SAMPLES_NAME

    out, plan = console(), job.plan
    table = results_table(found)
    wide = out.options.update_width(1000)
    out.print(table, width=Measurement.get(out, wide, table).maximum, crop=False)
    how = "greedy" if plan.sampling.temperature == 0 else f"temperature {plan.sampling.temperature}"
    out.print(
        f"{plan.samples} rollout{'s' if plan.samples > 1 else ''} a task, {how}; "
        f"passed: {plan.scoring.part} ≥ {plan.scoring.threshold:g}; {found.seconds:.1f} s"
    )
    for item in plan.sources:
        if item.skipped_too_long:
            out.print(f"{item.name}: {item.skipped_too_long:,} prompts too long, left out")
    if found.failed_rewards:
        out.print(f"{found.failed_rewards:,} rewards failed")
    out.print(f"files in {folder}/")
    for label, name in (("results", RESULTS_NAME), ("rollouts", SAMPLES_NAME)):
        out.print(f"  {label:<12} {name}")
    same = f"rlx eval {shlex.quote(source)} …" if source else "rlx eval …"
    more = f"{same} --samples 8" if plan.samples == 1 else f"{same} --temperature 0 --samples 1"
    next_step(more, f"rlx train --model {shlex.quote(job.config.model)}")


def results_table(found: Evaluation) -> Table:
    """One row a source."""
    sources = found.sources
    ks = sorted({k for result in sources.values() for k in result.pass_at})
    table = Table("source", *(["tasks", "mean"] + [f"pass@{k}" for k in ks]), box=None)
    for name in ("tokens", "truncated", *(["failed"] if _any_failed(found) else [])):
        table.add_column(name)
    for column in table.columns[1:]:
        column.justify, column.no_wrap = "right", True
    for name, result in sources.items():
        error = "" if math.isnan(result.mean_stderr) else f" ± {result.mean_stderr:.3f}"
        row = [name, f"{result.tasks:,}", f"{_text(result.mean, '.3f')}{error}"]
        row += [_text(result.pass_at[k], ".3f") for k in ks]
        row += [_text(result.length_mean, ".1f"), _text(result.truncated_rate, ".1%")]
        table.add_row(*row, *([f"{result.failed:,}"] if _any_failed(found) else []))
    return table


def _any_failed(found: Evaluation) -> bool:
    return any(result.failed for result in found.sources.values())


def _text(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)
