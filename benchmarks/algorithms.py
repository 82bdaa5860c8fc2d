"""Train the embedded task with every estimator and every loss from the same start.

    python -m benchmarks.algorithms [--steps 30] [--only NAME …] [--keep FILE]

Every estimator runs with the loss `ppo`, every loss with the estimator `group_norm`, each in a
process of its own (inline, transformers engine). Prints a Markdown table (reward after n steps,
seconds) and draws the curves into docs/algorithms.png. With `--keep` the runs are kept in a file,
and only those that it lacks are made: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlx.core.plugins import PluginSystem

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "algorithms.png"
BASELINE = {"estimators": "group_norm", "losses": "ppo"}
TAIL = 5
SETTINGS: dict[str, list[str]] = {
    # A critic needs larger steps than the policy, and a few of them before it is of use.
    "gae": ["critic.lr=1e-3", "critic.warmup_steps=3"],
    # Its surrogate divides the length out twice more than the others do: its steps are small.
    "gspo": ["learner.minibatch_size=64"],
    "gmpo": ["learner.minibatch_size=64"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--keep", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    keep: Path | None = arguments.keep
    done: dict[str, Any] = json.loads(keep.read_text()) if keep and keep.is_file() else {}
    print(
        f"| kind | name | first step | mean of the last {TAIL} | seconds |\n|---|---|---|---|---|"
    )
    curves: dict[str, dict[str, list[float]]] = {}
    for kind in BASELINE:
        curves[kind] = {}
        for name in names(kind):
            if arguments.only and name not in arguments.only:
                continue
            key = f"{kind} {name} {arguments.steps}"
            if key not in done:
                done[key] = train(kind, name, arguments.steps)
                if keep:
                    keep.write_text(json.dumps(done))
            rewards, seconds = done[key]
            curves[kind][name] = rewards
            last = sum(rewards[-TAIL:]) / TAIL
            row = f"| {kind} | `{name}` | {rewards[0]:.3f} | {last:.3f} | {seconds:.0f} |"
            print(row, flush=True)
    if not arguments.only:
        draw(curves)


def names(kind: str) -> list[str]:
    system = PluginSystem.load(hooks=False, rlxfile=False)
    return [name for name in system.names(kind) if "/" not in name]


def train(kind: str, name: str, steps: int) -> tuple[list[float], float]:
    """Rewards by step, and the wall time of the whole command."""
    chosen = {**BASELINE, kind: name}
    words = ["--estimator", chosen["estimators"], "--loss", chosen["losses"]]
    for setting in SETTINGS.get(name, ()):
        words += ["--set", setting]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rlx", "train", "--runtime", "inline"]
        command += ["--engine", "transformers", "--steps", str(steps), "--output", str(output)]
        started = time.perf_counter()
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{kind} {name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (output / "metrics.jsonl").read_text().splitlines()
        rewards = [json.loads(line)["reward/mean"] for line in lines]
        return rewards, time.perf_counter() - started


def draw(curves: dict[str, dict[str, Sequence[float]]]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(curves), figsize=(13, 5), sharey=True)
    for axis, (kind, rows) in zip(axes, curves.items(), strict=True):
        other = BASELINE["losses" if kind == "estimators" else "estimators"]
        for name, rewards in rows.items():
            axis.plot(range(1, len(rewards) + 1), rewards, label=name, linewidth=1.2)
        axis.set(title=f"{kind} × {other}", xlabel="step", ylim=(0, 1))
        axis.legend(fontsize=7, ncols=2, loc="lower right")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean reward")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    main()
