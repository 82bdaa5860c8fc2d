"""The commands that train an objective on fixed data; they differ in what they preset."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlx.cli.loading import loaded_plugins
from rlx.cli.offline_options import FLAGS, declared
from rlx.cli.options import RunOptions, options_of
from rlx.cli.output import console, next_step, print_warning
from rlx.cli.train import files_of, shown
from rlx.core.config import RunConfig, SourceConfig
from rlx.core.settings import DEFAULT, Settings, dump_yaml

if TYPE_CHECKING:
    from rlx.core.engine.offline.prepare import OfflinePlan
    from rlx.core.engine.session import TrainResult

_EMBEDDED_ROWS = {"training": 2048, "evaluation": 256}
"""Of the embedded task, where nothing is said: a first run takes a minute."""


def _command(name: str, summary: str, details: str, preset: Mapping[str, Any]) -> typer.Typer:
    """A command of its own, with the options that all of them share."""
    app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)

    def command(
        options: RunOptions,
        resume: Annotated[
            bool,
            typer.Option("--resume", help="Continue the run in --output from its last checkpoint."),
        ] = False,
        dry_run: Annotated[
            bool,
            typer.Option("--dry-run", help="Check all, print settings and rows, start nothing."),
        ] = False,
    ) -> None:
        _train(name, options, preset, resume=resume, dry_run=dry_run)

    command.__doc__ = f"{summary}\n\n{details}"
    epilog = f"Every setting, and where it came from: [bold]rlx {name} --dry-run[/bold]"
    app.command(name, epilog=epilog)(options_of(declared, FLAGS)(command))
    return app


_COLUMNS = "Other columns and ways to train: --set offline.KEY=VALUE (see --dry-run)."
sft = _command(
    "sft",
    "Fine-tune a language model on demonstrations.",
    f"Rows are prompt and completion, or messages, of which all answers are trained. {_COLUMNS}",
    {"objective": "sft", "learner": {"lr": 2e-5, "schedule": "cosine"}},
)
rm = _command(
    "rm",
    "Train a reward model on preference pairs.",
    "Rows are prompt, chosen and rejected. What comes out is used by "
    f"rlx train --reward model:PATH. {_COLUMNS}",
    {"objective": "rm", "learner": {"lr": 1e-5, "schedule": "cosine"}},
)
prm = _command(
    "prm",
    "Train a process reward model on judged steps.",
    f"Rows are prompt, completions (a list of steps) and labels. {_COLUMNS}",
    {"objective": "prm", "learner": {"lr": 1e-5, "schedule": "cosine"}},
)
dpo = _command(
    "dpo",
    "Train on preference pairs directly; also ipo, simpo and orpo, with --objective.",
    f"Rows are prompt, chosen and rejected. {_COLUMNS}",
    {"objective": "dpo", "learner": {"lr": 1e-6, "schedule": "linear"}},
)
kto = _command(
    "kto",
    "Train on answers that are desirable or not.",
    f"Rows are prompt, completion and label (true or false). {_COLUMNS}",
    {"objective": "kto", "learner": {"lr": 1e-6, "schedule": "linear"}},
)
distill = _command(
    "distill",
    "Draw a model's distributions to those of a teacher.",
    "Rows are those of `rlx sft`; with answers that the model itself wrote (`rlx generate`) it is "
    "taught on policy. --set objective.divergence=forward_kl, reverse_kl or js. " + _COLUMNS,
    {"objective": "distill", "learner": {"lr": 2e-5, "schedule": "cosine"}},
)


def _train(
    name: str, options: RunOptions, preset: Mapping[str, Any], *, resume: bool, dry_run: bool
) -> None:
    settings = options.settings(resume=resume, preset=preset, preset_name=f"rlx {name}")
    settings = _with_embedded_sizes(settings)
    from rlx.core.engine.offline.prepare import prepare_offline

    config = settings.config
    plugins = loaded_plugins(config)
    plan = prepare_offline(
        config,
        plugins=plugins,
        resume=resume,
        origins=settings.origins,
        status=lambda text: console(stderr=True).print(text),
    )
    for finding in plan.warnings:
        print_warning(finding.what, finding.fix)
    if dry_run:
        _dry_run(name, settings, plan)
        return
    from rlx.core.engine.offline.run import run_offline

    result = run_offline(plan)
    _report(name, plan, result)
    if result.signal is not None:
        raise typer.Exit(128 + result.signal)


def _with_embedded_sizes(settings: Settings) -> Settings:
    """Training on the embedded task evaluates on its test rows, and takes some of all rows."""
    config = settings.config
    if config.data.sources or config.data.path != "embedded":
        return settings
    changes: dict[str, Any] = {}
    if config.data.max_samples is None and settings.origin("data.max_samples") == DEFAULT:
        data = config.data.model_copy(update={"max_samples": _EMBEDDED_ROWS["training"]})
        changes["data"] = data
    if not config.eval.sources and settings.origin("eval.sources") == DEFAULT:
        count = _EMBEDDED_ROWS["evaluation"]
        source = SourceConfig(path="embedded", name="test", split="test", max_samples=count)
        changes["eval"] = config.eval.model_copy(update={"sources": [source]})
    return Settings(config=config.model_copy(update=changes), origins=settings.origins)


def _dry_run(name: str, settings: Settings, plan: OfflinePlan) -> None:
    """Print the settings to stdout and what the data comes to to stderr."""
    typer.echo(dump_yaml(settings.config, settings.origins), nl=False)
    out = console(stderr=True)
    for label, sources in (("training", plan.sources), ("evaluation", plan.evaluation)):
        for source in sources:
            out.print(
                f"{label}: {source.rows.rollout_count:,} of {source.read:,} rows of {source.name}, "
                f"{len(source.rows.tokens):,} tokens, {source.rows.action_count:,} trained"
                + (f", {source.probability:.1%} of the draws" if source.probability else "")
            )
            for complaint in source.complaints():
                out.print(f"  {complaint}")
    out.print(f"{plan.config.steps:,} optimizer steps")
    next_step(f"rlx {name} with the same options", stderr=True)


def _report(name: str, plan: OfflinePlan, result: TrainResult) -> None:
    out = console()
    config, folder = plan.config, shown(result.folder)
    reason = f", {result.reason}" if result.reason and result.steps < config.steps else ""
    out.print(f"{result.steps} of {config.steps} steps{reason}")
    for source in plan.sources:
        for complaint in source.complaints():
            out.print(complaint)
    for metric, value in result.metrics.items():
        if metric.startswith("eval/"):
            out.print(f"{metric} {value:.4g}")
    files_of(result.folder, folder)
    place = shlex.quote(folder)
    if result.steps < config.steps:
        next_step(f"rlx {name} --resume --output {place}")
    else:
        next_step(*_next_commands(config, plan, place))


def _next_commands(config: RunConfig, plan: OfflinePlan, place: str) -> list[str]:
    """What one would do with the trained model."""
    if not config.checkpoint.export:
        return [f"rlx export {place}"]
    if plan.selection.needs.head == "score":
        return [f"rlx train --reward model:{place}/export"]
    if plan.selection.needs.head == "token":
        return [f"rlx runs show {place}"]
    return [f"rlx train --model {place}/export", f"rlx eval {place}/export"]
