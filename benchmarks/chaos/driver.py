"""kill -9 of the driver at random moments: what `--resume` makes of what is left."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from benchmarks.chaos.runs import (
    Budget,
    LiveRun,
    Outcome,
    finished,
    last_step,
    left_alone,
    same_result,
    step_seconds,
)
from rlx.core.engine.checkpoints import latest_checkpoint, step_of
from rlx.core.run import is_finished

WORDS = "--groups 4 --engine transformers --checkpoint-every 1"


def kill_driver(
    folder: Path, budget: Budget, *, runtime: str, kills: int, steps: int, seed: int
) -> Outcome:
    """Kill, resume, kill again … until the run is done; then begin another run. Each must have the
    weights of the one that was left alone."""
    plain = left_alone(folder, [*WORDS.split(), "--steps", str(steps)])
    words = [*WORDS.split(), "--steps", str(steps), "--runtime", runtime]
    timed = finished(folder / "timed", words)
    moments = _Moments(timed, random.Random(seed))
    done = from_checkpoint = runs = equal = 0
    while done < kills and budget.left:
        runs += 1
        target = folder / f"killed-{runs}"
        left = _one_run(target, words, budget, kills - done, moments)
        done += len(left)
        from_checkpoint += sum(step > 0 for step in left)
        equal += same_result(target, plain)
        shutil.rmtree(target)
    return Outcome(
        fault=f"kill -9 of the driver ({runtime}), then `--resume`",
        injected=done,
        good=done if equal == runs else 0,
        note="{from_checkpoint:.0f} times from a checkpoint, else from the beginning; "
        "{equal:.0f} of {runs:.0f} runs end with the weights and metrics of the one left alone, "
        "bit by bit",
        numbers={"from_checkpoint": from_checkpoint, "equal": equal, "runs": runs},
    )


class _Moments:
    """Random moments of a run's start and of its steps.

    Args:
        timed: a finished run with the same words, for how long they take.
    """

    def __init__(self, timed: LiveRun, chance: random.Random) -> None:
        seconds = step_seconds(timed.folder)
        self._step = sum(seconds) / len(seconds)
        self._start = max(timed.seconds - sum(seconds), 1.0)
        self._chance = chance

    def wait_for_one(self, run: LiveRun) -> None:
        """Every fourth time in the start; else in one of the next steps, its checkpoint included,
        or after the last one."""
        ahead = self._chance.choice((0, 1, 1, 2))
        part = self._chance.uniform(0.0, 1.0)
        if ahead:
            run.wait_for_step(last_step(run.folder) + ahead)
            moment = time.monotonic() + part * self._step
        else:
            moment = run.started + part * self._start
        while run.alive() and time.monotonic() < moment:
            time.sleep(0.01)


def _one_run(
    folder: Path, words: list[str], budget: Budget, most: int, moments: _Moments
) -> list[int]:
    """Run to the end, with at most `most` kills on the way; returns the steps of the newest whole
    checkpoints that they left, 0 for none."""
    left: list[int] = []
    while True:
        run = LiveRun(folder, words, resume=(folder / "config.yaml").is_file())
        if len(left) < most:
            moments.wait_for_one(run)
        if len(left) < most and run.alive() and budget.left:
            run.kill()
            newest = latest_checkpoint(folder / "checkpoints")
            left.append(step_of(newest) if newest else 0)
            if is_finished(folder):  # it was on its way out
                return left
            continue
        code = run.wait()
        if code:
            raise RuntimeError(f"after {len(left)} kills, exit code {code}:\n{run.tail()}")
        return left
