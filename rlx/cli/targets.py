"""What a user means by a name (a model, a run, a checkpoint), and where results about it go."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rlx.cli.export import find_checkpoint, merge_model
from rlx.core.config import RunConfig
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.models import is_adapter
from rlx.core.run import CONFIG_NAME, MERGED_NAME, model_name

SOURCE = "MODEL_OR_RUN_OR_CHECKPOINT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is evaluated."""

    model: str | None
    """Folder or hub name; None: what the settings say."""
    settings: Path | None = None
    """Configuration of the run that it belongs to."""
    run: Path | None = None
    step: int = 0


def find_target(source: str | None, root: Path) -> Target:
    """Say what a user means by a name: a run, a checkpoint of one, or a model.

    Raises:
        UsageError: a run without a checkpoint, or nothing of that name in a folder that exists.
    """
    if source is None:
        return Target(model=None)
    folder = Path(source) if Path(source).exists() else root / source
    if not (folder / CONFIG_NAME).is_file() and not _has_model(folder):
        if "/" in source and not folder.exists() and Path(source).parent.is_dir():
            siblings = [path.name for path in Path(source).parent.iterdir()]
            raise UsageError(
                f"there is no model, run or checkpoint {source}",
                where=SOURCE,
                fix=did_you_mean(Path(source).name, siblings) or "`rlx runs list` shows the runs",
            )
        return Target(model=source)
    checkpoint = _below_here(find_checkpoint(source, root))
    run = checkpoint.parent.parent
    step = re.fullmatch(r"step-(\d+)", checkpoint.name)
    return Target(
        model=str(_whole_model(checkpoint)),
        settings=run / CONFIG_NAME if (run / CONFIG_NAME).is_file() else None,
        run=run if (run / CONFIG_NAME).is_file() else None,
        step=int(step.group(1)) if step else 0,
    )


def _has_model(folder: Path) -> bool:
    return any((folder / model_name(kind) / "config.json").is_file() for kind in (False, True))


def _whole_model(checkpoint: Path) -> Path:
    """The checkpoint's model; an adapter is merged once, into `merged/` of the run."""
    if not is_adapter(checkpoint / model_name(True)):
        return checkpoint / model_name(False)
    merged = checkpoint.parent.parent / MERGED_NAME / checkpoint.name
    if not (merged / "config.json").is_file():
        merge_model(checkpoint / model_name(True), merged)
    return merged


def _below_here(path: Path) -> Path:
    """Relative to the working directory where it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def numbered_folder(target: Target, config: RunConfig, kind: str) -> Path:
    """`RUN/KIND/step-NNNNNN-1`, or `KIND/MODEL-1`, with the first free number."""
    parent = target.run / kind if target.run else Path(kind)
    name = f"step-{target.step:06d}" if target.run else Path(config.model).name
    stem = re.sub(r"[^\w.-]+", "-", name) or "model"
    number = 1
    while (parent / f"{stem}-{number}").exists():
        number += 1
    return parent / f"{stem}-{number}"


def check_new(folder: Path) -> None:
    """Raise UsageError unless `--output` is new or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"{folder} exists and is not empty",
            where="--output",
            fix="a new folder, so that nothing is overwritten",
        )
