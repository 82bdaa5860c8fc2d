"""PPO with a critic on the embedded task: what the policy learns, and what the critic explains.

    python -m benchmarks.ppo [--seeds 3]

Trains benchmarks/ppo.yaml with several seeds, and once more without its discount (inline,
transformers engine); prints a Markdown table and draws the curves into docs/ppo.png. Then prints
what two ideal critics would explain of the same returns, by simulation: one that knows only how
much of the answer is left, one that also sees every wrong letter that was sampled.
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

import numpy as np

from rlx.embedded.task import LEVELS

HERE = Path(__file__).resolve().parent
PICTURE = HERE.parent / "docs" / "ppo.png"
RECIPE = HERE / "ppo.yaml"
UNDISCOUNTED = ["--set", "estimator.gamma=1"]
LAMBDA = 0.95
TAIL = 10
METRICS = {"reward": "reward/mean", "explained variance": "critic/explained_variance"}
Curves = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    runs = [(f"γ = 0.9, seed {seed}", seed, []) for seed in range(arguments.seeds)]
    found = {}
    print(f"| run | first reward | last {TAIL} | explained variance, last {TAIL} | seconds |")
    print("|---|---|---|---|---|")
    for name, seed, words in [*runs, ("γ = 1, seed 0", 0, UNDISCOUNTED)]:
        started = time.perf_counter()
        curves = found[name] = train(seed, words)
        seconds = time.perf_counter() - started
        reward, explained = curves["reward"], curves["explained variance"]
        cells = [name, *(f"{value:.3f}" for value in (reward[0], tail(reward), tail(explained)))]
        print("| " + " | ".join([*cells, f"{seconds:.0f}"]) + " |", flush=True)
    draw(found)
    print("\n| γ | reward | knows what is left | sees wrong letters too |\n|---|---|---|---|")
    for gamma in (1.0, 0.9):
        for success in (0.4, 0.9, 0.95):
            best = [explainable(success, gamma, sees_errors=sees) for sees in (False, True)]
            print(f"| {gamma:g} | {success:g} | {best[0]:.2f} | {best[1]:.2f} |")


def tail(curve: Sequence[float]) -> float:
    return sum(curve[-TAIL:]) / len(curve[-TAIL:])


def train(seed: int, words: list[str]) -> Curves:
    """Metrics by step of one run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        command = [sys.executable, "-m", "rlx", "train", "-c", str(RECIPE), "--seed", str(seed)]
        command += ["--runtime", "inline", "--engine", "transformers", "--output", str(output)]
        subprocess.run([*command, *words], check=True, stdout=subprocess.DEVNULL)
        records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return {name: [record[key] for record in records] for name, key in METRICS.items()}


def explainable(success: float, gamma: float, *, sees_errors: bool) -> float:
    """Explained variance of the λ-returns of an ideal critic, over simulated answers.

    An answer of `level` letters and EOS is right with probability `success`; each token fails by
    itself. The ideal value is γ^left times the probability of success, given what the critic knows.
    """
    generator = np.random.default_rng(0)
    slip = 1 - success ** (1 / (np.mean(LEVELS) + 1))
    values, returns = [], []
    for length in (level + 1 for level in LEVELS):
        wrong = generator.random((20_000, length)) < slip
        reward = (~wrong.any(1)).astype(float)
        left = np.arange(length)[::-1]
        if sees_errors:
            failed = np.maximum.accumulate(wrong, 1)[:, :-1]
            intact = ~np.pad(failed, ((0, 0), (1, 0)))
            value = np.where(intact, (1 - slip) ** (left + 1) * gamma**left, 0.0)
        else:
            value = np.broadcast_to((1 - slip) ** length * gamma**left, wrong.shape)
        targets = [reward]
        for t in range(length - 1, 0, -1):
            targets.insert(0, gamma * ((1 - LAMBDA) * value[:, t] + LAMBDA * targets[0]))
        values.append(value.ravel())
        returns.append(np.stack(targets, 1).ravel())
    value, target = np.concatenate(values), np.concatenate(returns)
    return float(1 - (target - value).var() / target.var())


def draw(found: dict[str, Curves]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(METRICS), figsize=(13, 4.5))
    for axis, metric in zip(axes, METRICS, strict=True):
        for name, curves in found.items():
            style = "--" if name.startswith("γ = 1,") else "-"
            curve = curves[metric]
            axis.plot(range(1, len(curve) + 1), curve, style, label=name, linewidth=1.2)
        axis.set(title=metric, xlabel="step", ylim=(-0.1, 1))
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8, loc="lower right")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=100)


if __name__ == "__main__":
    main()
