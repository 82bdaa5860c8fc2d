"""`rlx generate`: samples from a model with their rewards, and files to train on made of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli.common_options import ConfigFiles, Root
from rlx.cli.loading import loaded_plugins
from rlx.cli.output import console, next_step, print_notice, print_warning
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
from rlx.core.errors import RunInterrupted, UsageError
from rlx.core.run import CONFIG_NAME, MANIFEST_NAME
from rlx.core.same_samples import first_difference
from rlx.core.settings import DEFAULT, Settings, load_settings

if TYPE_CHECKING:
    from rlx.core.engine.generate import Generated, GenerateJob

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

FOLDER = "generated"
FLAGS = {
    "model": "model",
    "data": "data.path",
    "reward": "rewards",
    "samples": "generate.samples",
    "select": "generate.select",
    "keep": "generate.keep",
    "min_reward": "generate.min_reward",
    "min_margin": "generate.min_margin",
    "parquet": "generate.parquet",
    "temperature": "generate.temperature",
    "max_new_tokens": "rollout.max_new_tokens",
    "max_tasks": "data.max_samples",
    "agent": "agent",
    "engine": "rollout.engine",
    "runtime": "runtime.kind",
    "seed": "seed",
}
"""Flag of `rlx generate` → key of the configuration."""


@app.command(epilog="The settings are those of a run: [bold]rlx train --dry-run[/bold] lists them.")
def generate(
    source: Source = None,
    data: Annotated[str | None, typer.Option("--data", help="Prompts: file, folder, …")] = None,
    reward: Rewards = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", help="Samples of each task.")
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option("--select", help="all, best, pairs or conditioned; repeatable."),
    ] = None,
    keep: Annotated[
        int | None, typer.Option("--keep", help="best: most samples of a task.")
    ] = None,
    min_reward: Annotated[
        float | None, typer.Option("--min-reward", help="best: least reward.")
    ] = None,
    min_margin: Annotated[
        float | None,
        typer.Option("--min-margin", help="pairs: least difference of the rewards."),
    ] = None,
    parquet: Annotated[
        bool | None, typer.Option("--parquet", help="Write Parquet, not JSON lines.")
    ] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0 is greedy.")] = None,
    max_new_tokens: MaxNewTokens = None,
    max_tasks: MaxTasks = None,
    agent: Agent = None,
    engine: Engine = None,
    runtime: Runtime = None,
    seed: Seed = None,
    output: Annotated[
        Path | None, typer.Option("--output", help="Folder for the samples; new or empty.")
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the samples in --output, or select anew."),
    ] = False,
    root: Root = Path("runs"),
    config: ConfigFiles = None,
    set_: Sets = None,
) -> None:
    """Sample responses with rewards, and make data of them: the best, pairs, conditioned.

    A kill loses nothing: `--resume --output FOLDER` goes on, or selects again without sampling.
    """
    given = {name: value for name, value in locals().items() if name in FLAGS}
    target = find_target(source, root)
    settings = _settings(target, given, config or [], set_ or [], output if resume else None)
    folder = output or numbered_folder(target, settings.config, FOLDER)
    if resume:
        _check_resumable(output, settings)
    else:
        check_new(folder)
    from rlx.core.engine.generate import generate as run_generation
    from rlx.core.engine.generate import prepare_generation

    plugins = loaded_plugins(settings.config)
    job = prepare_generation(settings.config, plugins=plugins, origins=settings.origins)
    for finding in job.setup.warnings:
        print_warning(finding.what, finding.fix)
    try:
        with shown() as (status, progress):
            found = run_generation(job, folder, status=status, progress=progress)
    except RunInterrupted as stop:
        print_notice(f"{stop}; what is done is in {folder}/")
        next_step(f"rlx generate --resume --output {shlex.quote(str(folder))}", stderr=True)
        raise typer.Exit(128 + (stop.signal or 2)) from None
    _report(job, found, folder)


def _settings(
    target: Target,
    given: dict[str, Any],
    files: list[Path],
    sets: list[str],
    resumed: Path | None,
) -> Settings:
    """Those of the folder or the run, files, environment, flags and `--set`, in this order.

    Without a word about rewards there are none: the default of training compares with a label,
    which prompts for generation need not have. A run on fixed data said nothing about them either.
    """
    first = [path for path in (target.settings, resumed and resumed / CONFIG_NAME) if path]
    settings = load_settings(
        files=[*(path for path in first if path.is_file()), *files],
        sets=sets,
        flags={"model": target.model, **flags_of(given)},
        names=FLAGS,
    )
    origin = settings.origin("rewards")
    silent = target.settings if target.run and _trained_on_data(target.run) else None
    if origin != DEFAULT and not (silent and origin.startswith(f"{silent}:")):
        return settings
    return Settings(
        config=settings.config.model_copy(update={"rewards": []}), origins=settings.origins
    )


def _trained_on_data(run: Path) -> bool:
    """Whether the run fitted an objective to fixed data, where no reward is asked for."""
    try:
        manifest = json.loads((run / MANIFEST_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return "objective" in manifest.get("facts", {})


def _check_resumable(folder: Path | None, settings: Settings) -> None:
    path = folder / CONFIG_NAME if folder else None
    if path is None or not path.is_file():
        where = f"--output {folder}" if folder else "--resume"
        what = f"{folder} holds no samples" if folder else "nothing is named that could go on"
        raise UsageError(what, where=where, fix="`--resume --output FOLDER` of an earlier call")
    before = load_settings(files=[path], env={}).config
    if (key := first_difference(before, settings.config)) is not None:
        raise UsageError(
            f"the samples in {folder} were made with another {key}",
            where=f"{key} ({settings.origin(key)})",
            fix="the setting as it was, or a new folder",
        )


def _report(job: GenerateJob, found: Generated, folder: Path) -> None:
    out, totals = console(), found.totals
    again = f" ({found.resumed:,} were done before)" if found.resumed else ""
    out.print(
        f"{totals.samples:,} samples of {totals.tasks:,} tasks{again}; "
        f"{totals.length_mean or 0.0:.1f} tokens, {totals.truncated_rate or 0.0:.1%} cut off; "
        f"{found.seconds:.1f} s"
    )
    if totals.parts and totals.reward_mean is not None and totals.best_mean is not None:
        out.print(f"reward {totals.reward_mean:.3f}, of each task's best {totals.best_mean:.3f}")
    for source in job.tasks.sources:
        if source.skipped_too_long:
            out.print(f"{source.name}: {source.skipped_too_long:,} prompts too long, left out")
    if totals.failed:
        out.print(f"{totals.failed:,} tasks without samples, because a reward failed")
    out.print(f"files in {folder}/")
    for file in found.files.values():
        out.print(f"  {file.path.name:<18} {file.rows:,} rows")
        for reason, count in sorted(file.dropped.items()):
            out.print(f"  {'':<18} left out: {count:,} {reason}")
    next_step(*_next_commands(job, found, folder))


def _next_commands(job: GenerateJob, found: Generated, folder: Path) -> list[str]:
    """What reads the files; the data settings that the rows are already made with fall away."""
    model = shlex.quote(job.config.model)
    plain = job.config.data.chat_template is False
    more = " --set data.chat_template=false" if plain else ""
    commands = []
    for form, file in found.files.items():
        if form != "all" and file.rows:
            command = "dpo" if form == "pairs" else "sft"
            commands.append(
                f"rlx {command} --model {model} --data {shlex.quote(str(file.path))}{more}"
            )
    if commands:
        return commands
    place = shlex.quote(str(folder))
    if job.config.rewards:
        return [f"rlx generate --resume --output {place} --select best --select pairs"]
    samples = next(shlex.quote(str(file.path)) for file in found.files.values())
    return [f"rlx distill --model {model} --teacher MODEL --data {samples}{more}"]
