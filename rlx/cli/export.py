"""`rlx export`: a checkpoint's policy, or an adapter with its base, as a Hugging Face folder."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rlx.cli.common_options import Root
from rlx.cli.output import console, next_step
from rlx.core.errors import UsageError
from rlx.core.models import ModelInfo, is_adapter, model_info
from rlx.core.run import model_name
from rlx.core.sizes import gib

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)


@app.command()
def export(
    source: Annotated[
        str,
        typer.Argument(
            help="Run folder (its newest checkpoint), a checkpoint, or an adapter's folder."
        ),
    ],
    destination: Annotated[Path, typer.Argument(help="Folder to write; new or empty.")],
    root: Root = Path("runs"),
    merge: Annotated[
        bool,
        typer.Option("--merge", help="Write the whole model with the adapter in it."),
    ] = False,
) -> None:
    """Write a checkpoint's model, with tokenizer, as a Hugging Face folder.

    A checkpoint of adapters gives the adapter, in peft's format, or with --merge the whole model.
    """
    folder = _source_folder(source, root)
    name = folder.name if is_adapter(Path(source)) else folder.parent.name
    if is_adapter(folder) and not merge:
        place_folder(destination, functools.partial(_copy, folder), check=None)
        _report(name, destination, "the adapter")
        next_step(f"rlx export --merge {source} MODEL")
        return
    info = merge_model(folder, destination) if merge else copy_model(folder, destination)
    count = f"{info.parameters:,} parameters, " if info.parameters else ""
    _report(name, destination, f"{count}{info.dtype}")
    next_step(f"rlx train --model {destination}", f"vllm serve {destination}")


def _report(name: str, destination: Path, what: str) -> None:
    size = sum(path.stat().st_size for path in destination.iterdir())
    console().print(f"{name} → {destination}/ ({gib(size)}, {what})")


def _source_folder(source: str, root: Path) -> Path:
    """The model's or the adapter's folder that a user means, checked."""
    if is_adapter(Path(source)):
        return Path(source)
    checkpoint = find_checkpoint(source, root)
    _check_whole(checkpoint)
    return checkpoint / model_name(_has_adapter(checkpoint))


def _has_adapter(checkpoint: Path) -> bool:
    return is_adapter(checkpoint / model_name(True))


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
    if (folder / model_name(False)).is_dir() or _has_adapter(folder):
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
    """Copy a Hugging Face folder; raises UsageError when the destination can't be written."""
    place_folder(destination, functools.partial(_copy, model), check=model_info)
    return model_info(str(destination))


def merge_model(folder: Path, destination: Path) -> ModelInfo:
    """Write an adapter and its base as one model; raises UsageError.

    What is whole already is copied.
    """
    from rlx.core.engine.learner.merge import merge_adapter

    write = functools.partial(merge_adapter if is_adapter(folder) else _copy, folder)
    place_folder(destination, write, check=model_info)
    return model_info(str(destination))


def _copy(folder: Path, destination: Path) -> None:
    shutil.copytree(folder, destination)
    for path in folder.rglob("*"):
        copied = destination / path.relative_to(folder)
        if path.is_file() and path.stat().st_size != copied.stat().st_size:
            raise OSError(f"{copied.name} was not copied whole")


def place_folder(
    destination: Path, write: Callable[[Path], None], *, check: Callable[[str], object] | None
) -> None:
    """Have a folder written beside the destination, check it, then give it its name.

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
        write(aside)
        if check is not None:
            check(str(aside))
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


def _check_whole(checkpoint: Path) -> None:
    from rlx.core.engine.checkpoints import damage

    problems = damage(checkpoint) if (checkpoint / "files.json").is_file() else []
    name = model_name(_has_adapter(checkpoint))
    if not (checkpoint / name / "config.json").is_file():
        problems.append(f"{name}/config.json is missing")
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
