"""The options that describe an offline run, shared by the commands that train an objective."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import typer

from rlx.cli.common_options import (
    ALGORITHM,
    PLACES,
    SIZES,
    CheckpointEvery,
    ConfigFiles,
    Count,
    EvalEvery,
    LoraAlpha,
    LoraRank,
    LoraTargets,
    NoPlugin,
    NoRlxfile,
    Number,
    Output,
    Runtime,
    Text,
    Trackers,
    component_names,
    key_names,
)

FLAGS: Final[Mapping[str, str]] = {
    "model": "model",
    "data": "data.path",
    "eval_data": "eval.sources",
    "objective": "objective",
    "lr": "learner.lr",
    "lora_rank": "learner.lora.rank",
    "lora_alpha": "learner.lora.alpha",
    "lora_targets": "learner.lora.target_modules",
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


def _option(flag: str, help: str, panel: str, complete: Any = None, **more: Any) -> Any:
    return typer.Option(flag, help=help, rich_help_panel=panel, autocompletion=complete, **more)


def declared(
    model: Annotated[Text, _option("--model", "Folder or hub name.", ALGORITHM)] = None,
    data: Annotated[
        Text, _option("--data", "File, folder, hub name or file.py:load.", ALGORITHM)
    ] = None,
    eval_data: Annotated[
        list[str] | None,
        _option("--eval-data", "Held-out data; repeatable.", ALGORITHM, metavar="DATA"),
    ] = None,
    objective: Annotated[
        Text,
        _option(
            "--objective",
            "Objective, in place of the command's.",
            ALGORITHM,
            component_names("objectives"),
            metavar="NAME",
        ),
    ] = None,
    reference: Annotated[
        Text,
        _option("--reference", "Reference model (default: where training starts).", ALGORITHM),
    ] = None,
    teacher: Annotated[
        Text, _option("--teacher", "Model to distil from, of the same vocabulary.", ALGORITHM)
    ] = None,
    lr: Annotated[Number, _option("--lr", "Learning rate.", ALGORITHM)] = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = None,
    seed: Annotated[Count, _option("--seed", "Of everything random.", ALGORITHM)] = None,
    epochs: Annotated[Number, _option("--epochs", "Passes over the data (default: 1).", SIZES)] = (
        None
    ),
    steps: Annotated[
        Count, _option("--steps", "Optimizer steps, in place of epochs.", SIZES)
    ] = None,
    batch_size: Annotated[
        Count, _option("--batch-size", "Rows of an optimizer step (default: 32).", SIZES)
    ] = None,
    max_length: Annotated[
        Count, _option("--max-length", "Longest sequence in tokens.", SIZES)
    ] = None,
    max_samples: Annotated[
        Count, _option("--max-samples", "Rows taken from each data set.", SIZES)
    ] = None,
    ranks: Annotated[Count, _option("--ranks", "Processes that train together.", PLACES)] = None,
    runtime: Runtime = None,
    output: Output = None,
    checkpoint_every: CheckpointEvery = None,
    eval_every: EvalEvery = None,
    best: Annotated[
        Text,
        _option("--best", "Metric by which a checkpoint is kept.", PLACES, metavar="METRIC"),
    ] = None,
    tracker: Trackers = None,
    no_plugin: NoPlugin = None,
    no_rlxfile: NoRlxfile = False,
    config: ConfigFiles = None,
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
