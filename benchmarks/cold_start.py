"""From the command to the end of the first step: `rlx train` on the embedded model.

    python -m benchmarks.cold_start [--rounds 2]

Ray, vLLM and the learner start from nothing; the clock begins before Python does and stops when
the first line of metrics is written. Prints a Markdown table (docs/performance.md holds one).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measuring import warn_if_busy

WAYS = {
    "`rlx train` (Ray, vLLM)": [],
    "`--runtime inline` (vLLM)": ["--runtime", "inline"],
    "`--engine transformers` (Ray)": ["--engine", "transformers"],
    "`--runtime inline --engine transformers`": [
        *("--runtime", "inline", "--engine", "transformers")
    ],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    warn_if_busy()
    print("| way | seconds to the first step's end | of which the step |")
    print("|---|---|---|")
    for name, words in WAYS.items():
        found = [start(words) for _ in range(arguments.rounds)]
        shown = ", ".join(f"{seconds:.1f}" for seconds, _ in found)
        print(f"| {name} | {shown} | {found[-1][1]:.1f} |", flush=True)


def start(words: list[str]) -> tuple[float, float]:
    """Seconds from the command to the end of the first step, and those of the step."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rlx", "train", "--steps", "1", "--output", str(output)]
        started = time.time()
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
        first = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    return first["time"] - started, first["time/step"]


if __name__ == "__main__":
    main()
