"""`rlx sft` and `rlx dpo` beside TRL's SFTTrainer and DPOTrainer: the same work, side by side.

    python -m benchmarks.prepare_smollm2
    python -m benchmarks.vs_trl_offline [--rounds 2] [--settings …] [--trl-python PATH]

Both train SmolLM2-135M-Instruct for an epoch on the same rows as they are, long and short: problems
of GSM8K with their solutions, pairs of hh-rlhf (harmless). The same optimizer, learning rate, rows
a step and number of threads. The seconds are those of the training loop, the reference's log-probs
included, without loading and start-up; tokens are those of the sequences, without padding. Peak
memory is that of all processes of the command. The sides take turns.

Prints a Markdown table (docs/performance.md holds one).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import DATA
from benchmarks.ladder_data import prompt_of
from benchmarks.measuring import measure, warn_if_busy
from benchmarks.trl_environment import add_side_options, in_turns, trl_python

MODEL = "models/smollm2-135m-instruct"
SIDE = Path(__file__).parent / "trl_side" / "offline.py"
LONGEST = 512
TRIED = {
    "sft": (
        "bfloat16, batches of 4",
        "bfloat16, batches of 4, padding-free",
        "bfloat16, by length",
    ),
    "dpo": ("bfloat16", "bfloat16, batches of 4"),
}
"""Settings of TRL that may be its best; the fastest counts."""
ROWS = {"sft": 96, "dpo": 48}
BATCH = {"sft": 16, "dpo": 8}
LR = {"sft": 2e-5, "dpo": 1e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One side's training."""

    seconds: float
    tokens: int
    peak_gib: float
    losses: list[float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("objectives", nargs="*", default=["sft", "dpo"], metavar="sft|dpo")
    parser.add_argument("--rows", type=int, help="rows of data")
    parser.add_argument("--set", action="append", default=[], help="further settings of rlx")
    add_side_options(parser)
    arguments = parser.parse_args()
    python = "" if arguments.only == "rlx" else trl_python(arguments.trl_python)
    warn_if_busy()
    print("| objective | side | tokens | seconds | tokens/s | peak GiB | first, last loss |")
    print("|---|---|---|---|---|---|---|")
    for objective in arguments.objectives:
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "rows.jsonl"
            write_rows(objective, arguments.rows or ROWS[objective], data)
            settings = arguments.settings or TRIED[objective]
            sides: dict[str, Callable[[], Outcome]] = {}
            if arguments.only != "rlx":
                for one in settings:
                    sides[f"TRL, {one}"] = partial(run_trl, python, objective, data, one)
            if arguments.only != "trl":
                sides["rlx"] = partial(run_rlx, objective, data, arguments.set)
            compare(objective, sides, arguments.rounds)


def compare(objective: str, sides: dict[str, Callable[[], Outcome]], rounds: int) -> None:
    """Run the sides in turns and print a line each, then the ratio of their speeds."""
    found = in_turns(sides, rounds)
    speeds = {}
    for name, outcomes in found.items():
        seconds = fmean(one.seconds for one in outcomes)
        tokens, losses = outcomes[0].tokens, outcomes[0].losses
        peak = max(one.peak_gib for one in outcomes)
        speeds[name] = tokens / seconds
        print(
            f"| {objective} | {name} | {tokens:,} | {seconds:.1f} | {speeds[name]:,.0f} "
            f"| {peak:.2f} | {losses[0]:.4f}, {losses[-1]:.4f} |",
            flush=True,
        )
    others = [speed for name, speed in speeds.items() if name != "rlx"]
    if "rlx" in speeds and others:
        print(
            f"| {objective} | ratio | | | **{speeds['rlx'] / max(others):.2f}** | | |", flush=True
        )


def write_rows(objective: str, count: int, path: Path) -> None:
    """Rows that fit into `LONGEST` tokens, drawn at random: prompt and answer(s), plain text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    name, make = {"sft": ("gsm8k-train", solution), "dpo": ("hh-harmless-pairs", pair)}[objective]
    rows = [make(json.loads(line)) for line in (DATA / f"{name}.jsonl").open()]
    random.Random(0).shuffle(rows)
    kept: list[dict[str, str]] = []
    for row in rows:
        answers = [] if row is None else [row[key] for key in row if key != "prompt"]
        longest = max(
            (len(tokenizer(row["prompt"] + one)["input_ids"]) for one in answers), default=LONGEST
        )
        if longest < LONGEST - 2 and len(kept) < count:
            kept.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def solution(row: dict[str, str]) -> dict[str, str]:
    return {"prompt": f"{row['question']}\n", "completion": row["answer"]}


def pair(row: dict[str, str]) -> dict[str, str] | None:
    prompt = prompt_of(row)
    if prompt is None:
        return None
    answers = {key: row[key].removeprefix(prompt) for key in ("chosen", "rejected")}
    return {"prompt": prompt, **answers} if all(text.strip() for text in answers.values()) else None


def run_trl(python: str, objective: str, data: Path, settings: str) -> Outcome:
    job = {
        "objective": objective,
        "model": MODEL,
        "data": str(data),
        "batch_size": BATCH[objective],
        "lr": LR[objective],
        "settings": settings,
        "threads": len(os.sched_getaffinity(0)),
    }
    done = measure([python, str(SIDE), json.dumps(job)], env={"TOKENIZERS_PARALLELISM": "false"})
    answer = json.loads(done.output.splitlines()[-1])
    return Outcome(
        seconds=answer["seconds"],
        tokens=int(answer["tokens"]),
        peak_gib=done.peak_gib,
        losses=answer["losses"],
    )


def run_rlx(objective: str, data: Path, settings: list[str]) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "run"
        words = ["--model", MODEL, "--data", str(data), "--output", str(output)]
        words += ["--batch-size", str(BATCH[objective]), "--lr", str(LR[objective])]
        words += ["--runtime", "inline"]
        fixed = ["data.chat_template=false", "data.label=null", "learner.schedule=constant"]
        for one in [*fixed, "checkpoint.export=false", *settings]:
            words += ["--set", one]
        done = measure([sys.executable, "-m", "rlx", objective, *words])
        lines = (output / "metrics.jsonl").read_text().splitlines()
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return Outcome(
        seconds=sum(record["time/step"] for record in records)
        + records[0].get("time/reference", 0.0),
        tokens=round(sum(r["throughput/tokens_per_s"] * r["time/step"] for r in records)),
        peak_gib=done.peak_gib,
        losses=[record["train/loss"] for record in records],
    )


if __name__ == "__main__":
    main()
