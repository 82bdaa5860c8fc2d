"""The ladder on real data: every command of offline training, and RL against the reward model.

    python -m benchmarks.prepare_smollm2
    python -m benchmarks.ladder prepare [--data FOLDER]   data and starting models into ladder/
    python -m benchmarks.ladder STAGE                     some minutes each on one CPU core
    python -m benchmarks.ladder table                     what the stages measured

Stages: sft, rm, dpo, kto, prm, distill and generate (after sft), grpo (after rm).

SmolLM2-135M-Instruct on GSM8K and on 1,800 pairs of hh-rlhf (harmless), 200 rows of each held out.
What learns to judge, and the student, start from the first six of its thirty layers, so that a pass
over all pairs takes minutes. Steps to judge are those of GSM8K's solutions; half of the solutions
go on with the steps of another problem from some step on, and those are false.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.ladder_data import HELD_OUT, prepare

FOLDER = Path("ladder")
MODEL = "models/smollm2-135m-instruct"
_COMMON = "--set runtime.cpus=1 --runtime inline --set learner.token_budget=1024"
_OFFLINE = f"{_COMMON} --set learner.logprob_chunk=512 --set eval.before_training=true"
_PAIRS = "--data ladder/pairs-train.jsonl --eval-data ladder/pairs-held-out.jsonl"
_UNPAIRED = "--data ladder/unpaired-train.jsonl --eval-data ladder/unpaired-held-out.jsonl"
_STEPS = "--data ladder/steps-train.jsonl --eval-data ladder/steps-held-out.jsonl"
_SOLVED = (
    "--data ladder/gsm8k-train.jsonl --eval-data ladder/gsm8k-held-out.jsonl "
    "--set data.prompt=question --set data.label=null --set offline.completion=answer "
    "--max-length 384"
)
STAGES = {
    "sft": f"sft --model {MODEL} {_SOLVED} --max-samples 256 --set eval.max_tasks=64 "
    f"--batch-size 16 --lr 2e-5 --eval-every 8 {_OFFLINE}",
    "rm": f"rm --model ladder/six {_PAIRS} --max-length 64 --batch-size 32 --lr 1e-4 "
    f"--set learner.warmup_steps=5 --eval-every 25 {_OFFLINE}",
    "dpo": f"dpo --model {MODEL} {_PAIRS} --max-length 128 --max-samples 640 "
    f"--batch-size 16 --lr 5e-5 --set learner.warmup_steps=4 --eval-every 10 {_OFFLINE}",
    "kto": f"kto --model {MODEL} {_UNPAIRED} --max-length 128 --max-samples 640 "
    f"--set eval.max_tasks=100 --batch-size 32 --lr 5e-5 --eval-every 5 {_OFFLINE}",
    "prm": f"prm --model ladder/six {_STEPS} --max-length 256 --max-samples 2000 "
    f"--batch-size 32 --lr 1e-4 --set learner.warmup_steps=5 --eval-every 25 {_OFFLINE}",
    "distill": f"distill --model ladder/six --teacher ladder/sft/export {_SOLVED} "
    "--max-samples 256 --set eval.max_tasks=64 --batch-size 16 --lr 3e-4 --eval-every 8 "
    f"{_OFFLINE}",
    "generate": "generate ladder/sft/export --data ladder/gsm8k-held-out.jsonl "
    "--set data.prompt=question --set data.label=answer --reward math -n 4 --max-tasks 32 "
    f"--max-new-tokens 160 --select all --select best --select pairs {_COMMON}",
    "grpo": f"train --model {MODEL} --data ladder/prompts-train.jsonl "
    "--eval-data ladder/prompts-held-out.jsonl --set data.label=null "
    "--set eval.before_training=true --eval-every 10 --set eval.samples=4 "
    "--set data.chat_template=false --reward model:ladder/rm/export "
    "--set rewards.0.chat_template=false --set rewards.0.max_length=64 --estimator group_norm "
    f"--steps 20 --groups 8 --group-size 8 --max-new-tokens 24 --lr 5e-5 {_COMMON}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("prepare", "table", *STAGES))
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    arguments = parser.parse_args()
    if arguments.what == "prepare":
        prepare(arguments.data, FOLDER, MODEL)
    elif arguments.what == "table":
        table()
    else:
        words = [*STAGES[arguments.what].split(), "--output", str(FOLDER / arguments.what)]
        sys.exit(subprocess.run([sys.executable, "-m", "rlx", *words]).returncode)


def table() -> None:
    """Held-out numbers of each stage by step."""
    print("| stage | step | numbers |\n|---|---|---|")
    for stage in STAGES:
        path = FOLDER / stage / "metrics.jsonl"
        for record in map(json.loads, path.open()) if path.is_file() else ():
            names = [name for name in record if name.startswith("eval/")]
            if names:
                shown = ", ".join(f"{name.split('/')[-1]} {record[name]:.4f}" for name in names)
                print(f"| {stage} | {record['step']} | {shown} |")
    accuracy = _last("rm", "accuracy")
    if accuracy is not None:
        low, high = interval(round(accuracy * HELD_OUT), HELD_OUT)
        print(
            f"\nreward model: {accuracy:.1%} of {HELD_OUT}, 95 % interval {low:.1%} to {high:.1%}"
        )


def interval(successes: int, count: int) -> tuple[float, float]:
    """Clopper and Pearson's exact 95 % interval of a share."""

    def below(k: int, p: float) -> float:
        return math.fsum(math.comb(count, i) * p**i * (1 - p) ** (count - i) for i in range(k + 1))

    def root(above: Callable[[float], bool]) -> float:
        """Where `above` turns from true to false."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if above(middle) else (low, middle)
        return low

    return (
        root(lambda p: below(successes - 1, p) > 0.975),
        root(lambda p: below(successes, p) > 0.025),
    )


def _last(stage: str, metric: str) -> float | None:
    path = FOLDER / stage / "metrics.jsonl"
    found = [json.loads(line) for line in path.open()] if path.is_file() else []
    values = [
        record[name]
        for record in found
        for name in record
        if name.startswith("eval/") and name.endswith(f"/{metric}")
    ]
    return values[-1] if values else None


if __name__ == "__main__":
    main()
