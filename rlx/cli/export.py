"""`rlx export`: a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from rlx.cli.output import console, next_step
from rlx.core.errors import UsageError
from rlx.core.models import ModelInfo, model_info
from rlx.core.sizes import gib

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
def export(
    source: Annotated[
        str, typer.Argument(help="Run folder (its newest checkpoint), or a checkpoint folder.")
    ],
    destination: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    root: Annotated[Path, typer.Option("--root", help="Folder that holds the runs.")] = Path(
        "runs"
    ),
) -> None:
    """Write a checkpoint's model, with tokenizer, as a Hugging Face folder."""
    checkpoint = find_checkpoint(source, root)
    _check_whole(checkpoint)
    info = copy_model(checkpoint / "model", destination)
    size = sum(path.stat().st_size for path in destination.iterdir())
    count = f", {info.parameters:,} parameters" if info.parameters else ""
    console().print(f"{checkpoint.name} → {destination}/ ({gib(size)}{count}, {info.dtype})")
    next_step(f"rlx train --model {destination}", f"vllm serve {destination}")


def find_checkpoint(source: str, root: Path) -> Path:
    """The checkpoint folder that a user means.

    Raises:
        UsageError: no such folder, or a run without a checkpoint.
    """
    folder = Path(source) if Path(source).exists() else root / source
    if not folder.is_dir():
        raise UsageError(
            f"there is no run or checkpoint {source}",
            where="RUN_OR_CHECKPOINT",
            fix="a folder like runs/NAME or runs/NAME/checkpoints/step-000100 (`rlx runs list`)",
        )
    if (folder / "model").is_dir():
        return folder.resolve()
    found = sorted((folder / "checkpoints").glob("step-*[0-9]"))
    whole = [path for path in found if (path / "files.json").is_file()]
    if not whole:
        raise UsageError(
            f"{folder} has no checkpoint",
            where="RUN_OR_CHECKPOINT",
            fix="a run that has written one (`rlx train --checkpoint-every N`)",
        )
    return whole[-1]


def copy_model(model: Path, destination: Path) -> ModelInfo:
    """Copy a Hugging Face folder beside the destination, check it, then give it its name.

    Raises:
        UsageError: the destination is taken or can't be written.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UsageError(
            f"{destination} exists and is not empty",
            where="DEST",
            fix="a new folder, so that nothing is overwritten",
        )
    aside = destination.with_name(f"{destination.name}.partial-{os.getpid()}")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(model, aside)
        for path in model.rglob("*"):
            copied = aside / path.relative_to(model)
            if path.is_file() and path.stat().st_size != copied.stat().st_size:
                raise OSError(f"{copied.name} was not copied whole")
        model_info(str(aside))
        if destination.is_dir():
            destination.rmdir()
        aside.rename(destination)
    except OSError as error:
        raise UsageError(
            f"can't write {destination}: {error.strerror or error}",
            where="DEST",
            fix="a folder that can be written to, on a disk with room",
        ) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return model_info(str(destination))


def _check_whole(checkpoint: Path) -> None:
    from rlx.core.engine.checkpoints import damage

    problems = damage(checkpoint) if (checkpoint / "files.json").is_file() else []
    if not (checkpoint / "model" / "config.json").is_file():
        problems.append("model/config.json is missing")
    if problems:
        others = ", ".join(
            path.name
            for path in sorted(checkpoint.parent.glob("step-*[0-9]"))
            if path != checkpoint
        )
        raise UsageError(
            f"the checkpoint {checkpoint} is damaged: {'; '.join(problems[:3])}",
            where="RUN_OR_CHECKPOINT",
            fix=f"another one of that run: {others}" if others else "there is no other in that run",
        )
