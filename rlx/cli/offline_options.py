"""The options that describe an offline run, shared by the commands that train an objective."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from rlx.cli.options import component_names, key_names, words

FLAGS: Final[Mapping[str, str]] = {
    "model": "model",
    "data": "data.path",
    "eval_data": "eval.sources",
    "objective": "objective",
    "lr": "learner.lr",
    "epochs": "offline.epochs",
    "steps": "offline.steps",
    "batch_size": "offline.batch_size",
    "max_length": "offline.max_length",
    "max_samples": "data.max_samples",
    "reference": "kl.reference",
    "teacher": "offline.teacher",
    "seed": "seed",
    "ranks": "learner.ranks",
    "runtime": "runtime.kind",
    "output": "output",
    "checkpoint_every": "checkpoint.every",
    "eval_every": "eval.every",
    "best": "checkpoint.best",
    "tracker": "trackers",
    "no_plugin": "plugins.disable",
}
"""Flag → key of the configuration."""
_WHAT, _SIZES, _PLACES = "What is trained, and how", "Sizes", "Where it runs and writes"

Text = str | None
Count = int | None
Number = float | None


def _option(flag: str, help: str, panel: str, complete: Any = None, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, autocompletion=complete, **more)


def declared(
    model: Annotated[Text, _option("--model", "Folder or hub name.", _WHAT)] = None,
    data: Annotated[
        Text, _option("--data", "File, folder, hub name or file.py:load.", _WHAT)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        _option("--eval-data", "Held-out data; repeatable.", _WHAT, metavar="DATA"),
    ] = None,
    objective: Annotated[
        Text,
        _option(
            "--objective",
            "Objective, in place of the command's.",
            _WHAT,
            component_names("objectives"),
            metavar="NAME",
        ),
    ] = None,
    reference: Annotated[
        Text,
        _option("--reference", "Reference model (default: where training starts).", _WHAT),
    ] = None,
    teacher: Annotated[
        Text, _option("--teacher", "Model to distil from, of the same vocabulary.", _WHAT)
    ] = None,
    lr: Annotated[Number, _option("--lr", "Learning rate.", _WHAT)] = None,
    seed: Annotated[Count, _option("--seed", "Of everything random.", _WHAT)] = None,
    epochs: Annotated[Number, _option("--epochs", "Passes over the data (default: 1).", _SIZES)] = (
        None
    ),
    steps: Annotated[
        Count, _option("--steps", "Optimizer steps, in place of epochs.", _SIZES)
    ] = None,
    batch_size: Annotated[
        Count, _option("--batch-size", "Rows of an optimizer step (default: 32).", _SIZES)
    ] = None,
    max_length: Annotated[
        Count, _option("--max-length", "Longest sequence in tokens.", _SIZES)
    ] = None,
    max_samples: Annotated[
        Count, _option("--max-samples", "Rows taken from each data set.", _SIZES)
    ] = None,
    ranks: Annotated[Count, _option("--ranks", "Processes that train together.", _PLACES)] = None,
    runtime: Annotated[
        Text,
        _option(
            "--runtime",
            "ray, or inline: all in this process, for breakpoint().",
            _PLACES,
            words("ray", "inline"),
        ),
    ] = None,
    output: Annotated[
        Text, _option("--output", "Run folder (default: runs/NAME).", _PLACES)
    ] = None,
    checkpoint_every: Annotated[
        Count, _option("--checkpoint-every", "Steps between checkpoints.", _PLACES)
    ] = None,
    eval_every: Annotated[
        Count, _option("--eval-every", "Steps between evaluations; 0: at the end.", _PLACES)
    ] = None,
    best: Annotated[
        Text,
        _option("--best", "Metric by which a checkpoint is kept.", _PLACES, metavar="METRIC"),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        _option(
            "--tracker",
            "Where metrics go; repeatable.",
            _PLACES,
            component_names("trackers"),
            metavar="NAME",
        ),
    ] = None,
    no_plugin: Annotated[
        list[str] | None,
        _option(
            "--no-plugin", "Distribution that is not loaded; repeatable.", _PLACES, metavar="DIST"
        ),
    ] = None,
    no_rlxfile: Annotated[
        bool,
        typer.Option(
            "--no-rlxfile", help="Leave the hooks of ./rlxfile.py out.", rich_help_panel=_PLACES
        ),
    ] = False,
    config: Annotated[
        list[Path] | None,
        typer.Option("--config", "-c", help="YAML file; repeatable, later ones win."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any setting, as YAML: --set objective.beta=0.05.",
            metavar="KEY=VALUE",
            autocompletion=key_names,
        ),
    ] = None,
) -> None:
    """Carries the declarations; never called."""
