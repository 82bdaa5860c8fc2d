"""Timings from a recorded run in which generation and training took turns.

Seconds are fitted, with non-negative coefficients, to what each step's metrics say: generation to
the longest response and the sum of all, update and scoring to the tokens. Where steps are so alike
that the two can't be told apart, the fit holds for such steps and not for much larger ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.run import CONFIG_NAME, METRICS_NAME, ROLLOUTS_NAME
from rlx.core.settings import load_settings
from rlx.core.simulation.timings import Lengths, Timings

_WARM = 2
"""First steps, in which things compile and caches fill."""
_PHASES = ("rollout", "reward", "score", "update", "publish")
_REST = ("checkpoint", "eval")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    seconds: Mapping[str, float]
    longest: int
    sampled: int
    """Tokens, over all rollouts of the step."""
    whole: int
    """The same with prompts and observations."""
    lengths: Sequence[int]
    prompt: float


def calibrate(folder: Path) -> tuple[RunConfig, Timings]:
    """Read a run's settings, metrics and complete rollouts.

    Raises:
        UsageError: there is no such run, it ran ahead, or it has too few complete steps.
    """
    if not (folder / CONFIG_NAME).is_file():
        raise UsageError(f"there is no run in {folder}", where="--recorded")
    config = load_settings(files=[folder / CONFIG_NAME], env={}).config
    if config.rollout.max_staleness:
        raise UsageError(
            f"in {folder} generation ran ahead, so its phases say nothing of their own lengths",
            where="--recorded",
            fix="a run with rollout.max_staleness 0, and with the threads or GPUs that each side "
            "is to have",
        )
    steps = [step for step in _steps(folder, config) if step is not None][_WARM:]
    if len(steps) < 2:
        raise UsageError(
            f"{folder} has fewer than {_WARM + 2} steps with complete rollouts",
            where="--recorded",
            fix="a run with `--set logging.rollouts=complete` and more steps",
        )
    return config, _fit(steps, config)


def _steps(folder: Path, config: RunConfig) -> list[_Step | None]:
    lines = (folder / METRICS_NAME).read_text(encoding="utf-8").splitlines()
    found = []
    for line in lines:
        record = json.loads(line)
        if "time/rollout" not in record:  # an evaluation before the first step
            continue
        path = folder / ROLLOUTS_NAME / f"step-{record['step']:06d}.jsonl"
        found.append(_step(record, path, config) if path.is_file() else None)
    return found


def _step(record: Mapping[str, Any], path: Path, config: RunConfig) -> _Step | None:
    rollouts = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    if len(rollouts) < config.batch_size or any("exact" not in one for one in rollouts):
        return None
    lengths = [one["tokens"] for one in rollouts]
    return _Step(
        seconds={name: record.get(f"time/{name}") or 0.0 for name in ("step", *_PHASES, *_REST)},
        longest=max(lengths),
        sampled=sum(lengths),
        whole=sum(len(one["exact"]["tokens"]) for one in rollouts),
        lengths=lengths,
        prompt=fmean(one["exact"]["prompt_length"] for one in rollouts),
    )


def _fit(steps: Sequence[_Step], config: RunConfig) -> Timings:
    def seconds(name: str) -> list[float]:
        return [step.seconds[name] for step in steps]

    engines, ranks = config.rollout.engines, config.learner.ranks
    per_token, per_sequence = non_negative(
        [(step.longest, step.sampled / engines) for step in steps], seconds("rollout")
    )
    fixed, update = non_negative([(1.0, step.whole / ranks) for step in steps], seconds("update"))
    other = [
        step.seconds["step"] - sum(step.seconds[name] for name in (*_PHASES, *_REST))
        for step in steps
    ]
    return Timings(
        response_tokens=Lengths(values=[length for step in steps for length in step.lengths]),
        prompt_tokens=fmean(step.prompt for step in steps),
        step=per_token,
        step_per_sequence=per_sequence,
        reward=fmean(seconds("reward")),
        score_per_token=sum(seconds("score")) * ranks / sum(step.whole for step in steps),
        update=fixed,
        update_per_token=update,
        publish=fmean(seconds("publish")),
        other=max(fmean(other), 0.0),
    )


def non_negative(
    rows: Sequence[tuple[float, float]], wanted: Sequence[float]
) -> tuple[float, float]:
    """Least squares with two coefficients of which none is below 0; one is 0 rather than that."""
    matrix, target = np.array(rows, float), np.array(wanted, float)
    both = np.linalg.lstsq(matrix, target, rcond=None)[0]
    if (both >= 0).all():
        return float(both[0]), float(both[1])
    alone = [max(float(column @ target) / float(column @ column), 0.0) for column in matrix.T]
    errors = [float(np.square(matrix[:, i] * alone[i] - target).sum()) for i in range(2)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])
