"""`rlx train`: settings, checks, the run, and where its files are."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlx.cli.checks import checked
from rlx.cli.options import RunOptions, run_options
from rlx.cli.output import console, next_step
from rlx.core.run import CONFIG_NAME, METRICS_NAME
from rlx.core.settings import Settings, dump_yaml

if TYPE_CHECKING:
    from rlx.core.engine.session import TrainResult
    from rlx.core.plugins import PluginSystem

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command(epilog="Every setting, and where it came from: [bold]rlx train --dry-run[/bold]")
@run_options
def train(
    options: RunOptions,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run in --output from its last checkpoint."),
    ] = False,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            metavar="RUN",
            help="Train on the rollouts of a run that recorded them (logging.rollouts=complete), "
            "without an engine. Its settings hold where none are given.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print every setting, start nothing."),
    ] = False,
) -> None:
    """Train a language model with reinforcement learning.

    Without arguments a small model that ships with rlx learns its small task.

    Settings, later ones win: defaults, -c, environment (RLX_LEARNER__LR), flags, --set.
    """
    settings = options.settings(resume=resume, replay=replay)
    work = checked(settings, resume=resume)
    if dry_run:
        _dry_run(settings, work.plugins, resume=resume)
        return
    from rlx.core.engine.train import train as run_training

    result = run_training(
        settings.config, plugins=work.plugins, resume=resume, origins=settings.origins
    )
    _report(result, settings)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def _dry_run(settings: Settings, plugins: PluginSystem, *, resume: bool) -> None:
    """Check the data too; print the settings to stdout and all else to stderr."""
    from rlx.core.engine.prepare import prepare

    plan = prepare(settings.config, plugins=plugins, resume=resume, origins=settings.origins)
    typer.echo(dump_yaml(settings.config, settings.origins), nl=False)
    out = console(stderr=True)
    for label, sources in (
        ("training", plan.tasks.sources),
        ("evaluation", plan.evaluation.sources if plan.evaluation else ()),
    ):
        for source in sources:
            skipped, share = source.skipped_too_long, source.probability
            out.print(
                f"{label}: {len(source.tasks):,} tasks of {source.name}"
                + (f", {share:.1%} of the draws" if share else "")
                + (f", {skipped:,} skipped because their prompts are too long" if skipped else "")
            )
    next_step("rlx train with the same options", "rlx plan", stderr=True)


def _report(result: TrainResult, settings: Settings) -> None:
    out = console()
    folder = shown(result.folder)
    total = settings.config.steps
    reason = f", {result.reason}" if result.reason and result.steps < total else ""
    out.print(f"{result.steps} of {total} steps{reason}")
    if "reward/mean" in result.metrics:
        out.print(f"reward {result.metrics['reward/mean']:.3f} in the last step")
    files_of(result.folder, folder)
    place = shlex.quote(folder)
    if result.steps < total:
        next_step(f"rlx train --resume --output {place}", f"rlx runs show {place}")
    else:
        next_step(f"rlx runs show {place}", f"rlx runs rollouts {place}")


def files_of(folder: Path, name: str) -> None:
    """Print where the files of a run are; `name` is what the user calls its folder."""
    out = console()
    rows = {
        "settings": CONFIG_NAME,
        "metrics": METRICS_NAME,
        "rollouts": "rollouts",
        "checkpoints": "checkpoints",
        "model": "export",
    }
    out.print(f"files in {name}/")
    for label, part in rows.items():
        path = folder / part
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            out.print(f"  {label:<12} {part}{'/' if path.is_dir() else ''}")


def shown(folder: Path) -> str:
    """Relative to the working directory where it lies below it."""
    try:
        return str(folder.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(folder)
