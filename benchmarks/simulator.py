"""The simulator against a real run, and its table for 8, 64 and 512 GPUs.

python -m benchmarks.simulator              # records a run in turns, predicts one ahead, runs it
python -m benchmarks.simulator --table      # the table alone, from benchmarks/cluster_7b.yaml

The recorded run has half of the cores (`runtime.cpus`), as each side of the run ahead has.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

SETTINGS = (
    "train --steps {steps} --groups 32 --group-size 8 --max-new-tokens 32 --temperature 1.0 "
    "--set logging.rollouts=complete --set checkpoint.export=false --output {output}"
)
TIMINGS = Path(__file__).with_name("cluster_7b.yaml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--keep", type=Path, help="folder for the runs; those in it are used")
    options = parser.parse_args()
    if options.table:
        print_table()
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(options.keep or Path(folder), options.steps, options.engine)


def compare(folder: Path, steps: int, engine: str) -> float:
    """Print predicted and measured step time of a run ahead; returns their ratio."""
    from rlx.core.simulation.calibration import calibrate
    from rlx.core.simulation.run import Shape, simulate

    half = max(len(os.sched_getaffinity(0)) // 2, 1)
    more = ["--engine", engine]
    train(folder / "turns", steps, [*more, "--set", f"runtime.cpus={half}"])
    config, timings = calibrate(folder / "turns")
    shape = Shape(
        groups=config.rollout.groups,
        group_size=config.rollout.group_size,
        engines=1,
        ranks=1,
        max_running=config.rollout.max_running,
    )
    print("| | predicted | measured | ratio |\n|---|---|---|---|")
    ratio = 0.0
    for staleness in (0, 1):
        name = "turns" if staleness == 0 else "ahead"
        if staleness:
            train(folder / name, steps, [*more, "--max-staleness", "1"])
        found = simulate(timings, dataclasses.replace(shape, max_staleness=staleness))
        real = measured(folder / name)
        ratio = found.step / real["time/step"]
        print(
            f"| step, max_staleness {staleness} | {found.step:.3f} s | {real['time/step']:.3f} s "
            f"| {ratio:.2f} |"
        )
        if staleness:
            idle, age = real["rollout/engine_idle"], real["staleness/mean"]
            print(f"| engine idle | {found.engine_idle:.0%} | {idle:.0%} | |")
            print(f"| staleness, mean | {found.staleness:.2f} | {age:.2f} | |")
    return ratio


def train(output: Path, steps: int, more: list[str]) -> None:
    words = SETTINGS.format(steps=steps, output=output).split()
    command = [sys.executable, "-m", "rlx", *words, *more]
    if (output / "finished.json").is_file():
        return
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])


def measured(folder: Path) -> dict[str, float]:
    """Means over the steps after the first three that did not evaluate."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [one for one in map(json.loads, lines) if "time/step" in one][3:]
    records = [one for one in steps if "time/eval" not in one]
    names = ("time/step", "rollout/engine_idle", "staleness/mean")
    return {name: fmean(one.get(name, 0.0) for one in records) for name in names}


def print_table() -> None:
    """64 groups of 8 for 8 GPUs, and as many more for more GPUs."""
    import yaml

    from rlx.core.simulation.run import Shape, simulate
    from rlx.core.simulation.timings import Timings

    timings = Timings.model_validate(yaml.safe_load(TIMINGS.read_text()))
    print("| GPUs | placement | max_staleness | step | rollouts/s | engines idle | learner idle |")
    print("|---|---|---|---|---|---|---|")
    for gpus in (8, 64, 512):
        engines = gpus * 5 // 8
        cases = [
            ("all share", gpus, gpus, 0),
            ("5 : 3", engines, gpus - engines, 0),
            ("5 : 3", engines, gpus - engines, 1),
            ("5 : 3", engines, gpus - engines, 2),
        ]
        for placement, generating, ranks, staleness in cases:
            shape = Shape(
                groups=8 * gpus,
                group_size=8,
                engines=generating,
                ranks=ranks,
                max_staleness=staleness,
                partial_rollout=staleness > 0,
            )
            found = simulate(timings, shape, steps=6 if gpus < 512 else 4)
            print(
                f"| {gpus} | {placement} | {staleness} | {found.step:.0f} s "
                f"| {found.rollouts_per_second:,.1f} | {found.engine_idle:.0%} "
                f"| {found.learner_idle:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
