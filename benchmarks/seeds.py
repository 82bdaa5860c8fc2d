"""The main job over several seeds: does it reach 0.9, when, and in how many seconds?

    python -m benchmarks.seeds [--seeds 5] [-- further words for `rlx train`]

Prints a Markdown table (docs/results.md holds one).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GOAL = 0.9
TAIL = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("words", nargs="*", help="passed on to rlx train")
    arguments = parser.parse_args()
    print(f"| seed | first step | mean of the last {TAIL} | first step ≥ {GOAL} | seconds in all |")
    print("|---|---|---|---|---|")
    reached = 0
    for seed in range(arguments.seeds):
        rewards, seconds = train(seed, arguments.words)
        final = sum(rewards[-TAIL:]) / TAIL
        reached += final >= GOAL
        first = next((i for i, reward in enumerate(rewards, 1) if reward >= GOAL), None)
        print(
            f"| {seed} | {rewards[0]:.3f} | {final:.3f} | {first or '–'} | {seconds:.0f} |",
            flush=True,
        )
    print(f"\n{reached} of {arguments.seeds} seeds end at {GOAL} or above.")


def train(seed: int, words: list[str]) -> tuple[list[float], float]:
    """Run `rlx train` in a process of its own; the rewards by step and the wall time."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rlx", "train", "--seed", str(seed)]
        started = time.perf_counter()
        subprocess.run(
            [*command, "--output", str(output), *words], check=True, stdout=subprocess.DEVNULL
        )
        seconds = time.perf_counter() - started
        lines = (output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["reward/mean"] for line in lines], seconds


if __name__ == "__main__":
    main()
