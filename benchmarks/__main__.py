"""`make bench`: the benchmarks, one after the other.

    make bench ARGS="controller vs_trl"     some of them

Those that compare with TRL make an environment for it when there is none; `ladder`, which takes
an hour, runs only by name.
"""

from __future__ import annotations

import os
import subprocess
import sys

BENCHMARKS = (
    "prepare_smollm2",
    "controller",
    "cold_start",
    "floor",
    "learner_step",
    "packing",
    "zero",
    "publication",
    "vs_trl",
    "vs_trl_offline",
    "objectives_vs_trl",
    "seeds",
    "algorithms",
    "ppo",
)


def main() -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the load average is {load:.1f}; timings need an otherwise idle machine\n")
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"## {name}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
