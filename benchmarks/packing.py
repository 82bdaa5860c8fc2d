"""How long ranks wait for one another: two ways of sharing out a batch, on typical lengths.

A rank's time is taken as its tokens. `idle` is the part of all ranks' time that is spent waiting
for the busiest one: 1 − mean / max, on average over batches and at worst.

    python -m benchmarks.packing
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from rlx.core.engine.shares import largest_differencing, longest_first

BATCHES = 50
LIMIT = 2048
Split = Callable[[np.ndarray, int], list[list[int]]]


def lengths_of(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens of `count` rollouts."""
    drawn = {
        "equal": lambda: np.full(count, 40.0),
        "answers (log-normal)": lambda: 150 + rng.lognormal(5.0, 0.7, count),
        "reasoning (a fifth truncated)": lambda: 200 + rng.lognormal(6.9, 0.9, count),
        "agents (two kinds)": lambda: np.where(
            rng.random(count) < 0.7, rng.normal(250, 50, count), rng.normal(1600, 300, count)
        ),
    }[kind]()
    return np.clip(drawn, 8, LIMIT).astype(np.int64)


KINDS = (
    "equal",
    "answers (log-normal)",
    "reasoning (a fifth truncated)",
    "agents (two kinds)",
)


def idle(split: Split, kind: str, count: int, ranks: int) -> tuple[float, float, float]:
    """Mean and worst idle part, and milliseconds a batch."""
    parts, spent = [], 0.0
    for seed in range(BATCHES):
        lengths = lengths_of(kind, count, np.random.default_rng(seed))
        start = time.perf_counter()
        shares = split(lengths, ranks)
        spent += time.perf_counter() - start
        loads = np.array([lengths[share].sum() for share in shares])
        parts.append(1 - loads.mean() / loads.max())
    return float(np.mean(parts)), float(np.max(parts)), 1e3 * spent / BATCHES


def main() -> None:
    methods: dict[str, Split] = {
        "longest first": longest_first,
        "largest differencing": largest_differencing,
    }
    print("| lengths | rollouts | ranks | method | idle | at worst | ms |")
    print("|---|---:|---:|---|---:|---:|---:|")
    for kind in KINDS:
        for count, ranks in ((16, 2), (64, 4), (512, 8)):
            for name, split in methods.items():
                mean, worst, spent = idle(split, kind, count, ranks)
                print(
                    f"| {kind} | {count} | {ranks} | {name} | {mean:.3%} | {worst:.3%} "
                    f"| {spent:.1f} |"
                )


if __name__ == "__main__":
    main()
