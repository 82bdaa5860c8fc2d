"""`rlx runs verify`: is everything that a run left on disk whole?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.core.engine.checkpoints import checkpoints, damage
from rlx.core.errors import UsageError
from rlx.core.run import (
    CONFIG_NAME,
    FINISHED_NAME,
    MANIFEST_NAME,
    METRICS_NAME,
    is_finished,
)
from rlx.core.yaml_text import parse_file


@dataclass(frozen=True, slots=True)
class Part:
    """One file or folder of a run, and what is wrong with it."""

    name: str
    problems: list[str]
    whole: str
    """What to say of it when nothing is."""


def parts(folder: Path) -> Iterator[Part]:
    """Every part of the run in `folder`, checked."""
    yield Part(CONFIG_NAME, _read_config(folder / CONFIG_NAME), "can be run again")
    yield _json_file(folder / MANIFEST_NAME)
    yield _metrics(folder)
    for path in sorted((folder / "rollouts").glob("*.jsonl")):
        yield _json_lines(path)
    for path in sorted(checkpoints(folder / "checkpoints")):
        yield Part(f"checkpoints/{path.name}", damage(path), "sizes and checksums agree")
    if is_finished(folder) and (folder / "export").is_dir():
        files = list((folder / "export").glob("*.safetensors"))
        problems = [found for path in files for found in _weights(path)]
        problems += [] if files else ["there are no weights in it"]
        yield Part("export", problems, f"files of weights: {len(files)}")


def _read_config(path: Path) -> list[str]:
    try:
        parse_file(path.read_text(encoding="utf-8"), path.name)
    except (UsageError, OSError, ValueError) as error:
        return [str(error).splitlines()[0]]
    return []


def _json_file(path: Path) -> Part:
    try:
        json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return Part(path.name, [f"unreadable: {error}"], "")
    return Part(path.name, [], "readable")


def _weights(path: Path) -> list[str]:
    """What is wrong with a file of weights: its header says how long it must be."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            return []
    except (OSError, SafetensorError) as error:
        return [f"{path.name}: {error}"]


def _metrics(folder: Path) -> Part:
    """Each line, and that no step lacks one."""
    part = _json_lines(folder / METRICS_NAME)
    if part.problems:
        return part
    lines = map(json.loads, (folder / METRICS_NAME).read_bytes().splitlines())
    steps = {int(line["step"]) for line in lines if "step" in line}
    last = max(steps, default=0)
    if is_finished(folder):
        finished = json.loads((folder / FINISHED_NAME).read_text(encoding="utf-8"))
        last = max(last, int(finished.get("step", 0)))
    lacking = sorted(set(range(1, last + 1)) - steps)
    problems = [f"there is no line of step {step}" for step in lacking]
    return Part(part.name, problems, part.whole)


def _json_lines(path: Path) -> Part:
    name = path.name if path.name == METRICS_NAME else f"{path.parent.name}/{path.name}"
    if not path.is_file():
        return Part(name, ["it is missing"], "")
    lines = path.read_bytes().splitlines()
    problems = []
    for number, line in enumerate(lines, 1):
        try:
            json.loads(line)
        except ValueError as error:
            problems.append(f"line {number}: {error}")
    return Part(name, problems, f"{len(lines)} lines")
