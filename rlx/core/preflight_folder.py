"""Whether a run folder is free, or holds what `--resume` needs, and has room."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.models import ModelInfo
from rlx.core.preflight_case import Case, Finding, error, warning
from rlx.core.preflight_lora import resumed_complaints
from rlx.core.run import CONFIG_NAME, FINISHED_NAME, METRICS_NAME, ROLLOUTS_NAME, is_finished

Complaint = tuple[str, str]
"""What is wrong, and what to do."""


def check_output(case: Case) -> Iterator[Finding]:
    """The run folder can be written and is free, or holds what `--resume` needs."""
    config = case.config
    folder = config.output
    yield from (
        error(what, "output", fix)
        for what, fix in folder_complaints(folder, steps=config.steps, resume=case.resume)
    )
    if case.resume:
        yield from resumed_complaints(config)
    critic = "values" in case.selection.requires
    yield from check_place(config, case.info, critic=critic)


def check_place(config: RunConfig, info: ModelInfo, *, critic: bool) -> Iterator[Finding]:
    """The disk can be written to and has room.

    Args:
        critic: one is trained, too.
    """
    place = (config.output or Path("runs")).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        yield error(
            f"{place} is not a folder that can be written to",
            "output",
            "`--output` below a folder of yours",
        )
        return
    if info.parameters is None:
        return
    one = sizes.checkpoint_bytes(config, info, info.parameters, critic=critic)
    weights = sizes.weight_bytes(info.parameters, sizes.learner_dtype(config, info))
    best = config.checkpoint.best is not None
    kept = 1 if config.checkpoint.every == 0 and not best else config.checkpoint.keep + 1 + best
    free, needed = shutil.disk_usage(place).free, kept * one + weights * config.checkpoint.export
    space = f"{place} has {sizes.gib(free)} free"
    if free < one:
        yield error(
            f"{space}; one checkpoint takes {sizes.gib(one)}",
            "output",
            "`--output` on a larger disk",
        )
    elif free < needed:
        yield warning(
            f"{space}; {kept} checkpoints and the export take {sizes.gib(needed)}",
            "checkpoint.keep",
            "`--set checkpoint.keep=1`, or `--output` on a larger disk",
        )


def folder_complaints(folder: Path | None, *, steps: int, resume: bool) -> Iterator[Complaint]:
    """Yield what stands in the way of writing a run of `steps` steps into `folder`."""
    if folder is None:
        if resume:
            yield "--resume needs to know which run to continue", _resumable(Path("runs"))
        return
    if folder.exists() and not folder.is_dir():
        yield f"{folder} is a file", "another --output"
    elif resume:
        yield from _check_resume(folder, steps)
    elif is_finished(folder):
        yield (
            f"{folder} holds a finished run of {finished_step(folder)} steps",
            "another `--output`; or continue it with `--resume` and more `--steps`",
        )
    elif has_checkpoint(folder):
        yield (
            f"{folder} holds a run that has not finished",
            "continue it with `--resume`, or choose another `--output`",
        )
    elif _has_steps(folder):
        yield (
            f"{folder} holds a run that ended before its first checkpoint",
            "another `--output`; `--checkpoint-every N` makes a run one can resume",
        )
    elif _has_run(folder):
        return  # it failed before its first step: there is nothing to lose
    elif folder.is_dir() and any(folder.iterdir()):
        yield f"{folder} is not empty and holds no run of rlx", "an empty or new --output"


def has_checkpoint(folder: Path) -> bool:
    """Whether a run folder holds at least one checkpoint that was written to its end."""
    return any((folder / "checkpoints").glob("step-*[0-9]/files.json"))


def recorded_steps(folder: Path) -> int:
    """Steps from the first on whose rollouts a run recorded completely."""
    step = 0
    while _is_complete(folder / ROLLOUTS_NAME / f"step-{step + 1:06d}.jsonl"):
        step += 1
    return step


def _is_complete(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8") as lines:
            return "exact" in json.loads(next(lines))
    except (OSError, ValueError, StopIteration):
        return False


def finished_step(folder: Path) -> int:
    """Steps of a finished run; 0 when its mark can't be read."""
    try:
        return int(json.loads((folder / FINISHED_NAME).read_text())["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0


def _check_resume(folder: Path, steps: int) -> Iterator[Complaint]:
    if not _has_run(folder):
        yield f"there is no run in {folder} to resume", _resumable(folder.parent)
    elif is_finished(folder) and finished_step(folder) >= steps:
        done = finished_step(folder)
        yield (
            f"the run in {folder} has already done {done} of {steps} steps",
            f"more steps to continue it: `--steps {2 * done}`",
        )


def _has_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in (CONFIG_NAME, METRICS_NAME, "checkpoints"))


def _has_steps(folder: Path) -> bool:
    metrics = folder / METRICS_NAME
    return metrics.is_file() and metrics.stat().st_size > 0


def _resumable(root: Path) -> str:
    runs = [path.parent for path in root.glob(f"*/{CONFIG_NAME}")] if root.is_dir() else []
    runs = [path for path in runs if has_checkpoint(path) and not is_finished(path)]
    runs.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    if not runs:
        return "no run under that folder has a checkpoint: start one without --resume"
    return f"`--output {runs[0]} --resume`" + (
        f" (also: {', '.join(map(str, runs[1:4]))})" if len(runs) > 1 else ""
    )
