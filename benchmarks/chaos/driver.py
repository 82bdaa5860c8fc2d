"""kill -9 of the driver at random moments: what `--resume` makes of what is left."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

from benchmarks.chaos.runs import Budget, LiveRun, Outcome, finished, left_alone, same_result
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
    whole = time.monotonic() - timed.started
    chance = random.Random(seed)
    done = runs = equal = 0
    while done < kills and budget.left:
        runs += 1
        target = folder / f"killed-{runs}"
        done += _one_run(target, words, budget, kills - done, whole, chance)
        equal += same_result(target, plain)
        shutil.rmtree(target)
    return Outcome(
        fault=f"kill -9 of the driver ({runtime}), then `--resume`",
        injected=done,
        good=done if equal == runs else 0,
        note="{equal:.0f} of {runs:.0f} runs end with the weights and metrics of the one left "
        "alone, bit by bit",
        numbers={"equal": equal, "runs": runs},
    )


def _one_run(
    folder: Path,
    words: list[str],
    budget: Budget,
    most: int,
    whole: float,
    chance: random.Random,
) -> int:
    """Run to the end, with at most `most` kills on the way; returns how many there were."""
    done = 0
    while True:
        run = LiveRun(folder, words, resume=(folder / "config.yaml").is_file())
        moment = chance.uniform(0.2, 0.8) * whole
        while run.alive() and time.monotonic() - run.started < moment:
            time.sleep(0.01)
        if done < most and run.alive() and budget.left:
            run.kill()
            done += 1
            if is_finished(folder):  # it was on its way out
                return done
            continue
        code = run.wait()
        if code:
            raise RuntimeError(f"after {done} kills, exit code {code}:\n{run.tail()}")
        return done
