"""`make bench`: every benchmark that needs nothing but rlx, one after the other."""

from __future__ import annotations

import os
import subprocess
import sys

BENCHMARKS = ("seeds", "algorithms", "ppo")


def main() -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the load average is {load:.1f}; timings need an otherwise idle machine\n")
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"## {name}\n", flush=True)
        subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=True)


if __name__ == "__main__":
    main()
