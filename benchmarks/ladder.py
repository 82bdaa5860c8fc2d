"""The ladder on real data: fine-tuning, a reward model, preferences, RL against the reward model.

    python -m benchmarks.prepare_smollm2
    python -m benchmarks.ladder prepare          data and starting models into ladder/
    python -m benchmarks.ladder sft|rm|dpo|grpo  one stage, a few minutes each on one CPU core
    python -m benchmarks.ladder table            what the stages measured

SmolLM2-135M-Instruct on GSM8K and on 1,800 pairs of hh-rlhf (harmless), 200 rows of each held out.
The reward model starts from the first six of its thirty layers, so that a pass over all pairs
takes minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

DATA = Path("../shared/data")
FOLDER = Path("ladder")
MODEL = "models/smollm2-135m-instruct"
HELD_OUT = 200
LAYERS = 6
MARK = "\n\nAssistant:"

_COMMON = "--set runtime.cpus=1 --runtime inline --set learner.token_budget=1024"
_OFFLINE = f"{_COMMON} --set learner.logprob_chunk=512 --set eval.before_training=true"
_PAIRS = "--data ladder/pairs-train.jsonl --eval-data ladder/pairs-held-out.jsonl"
STAGES = {
    "sft": f"sft --model {MODEL} --data ladder/gsm8k-train.jsonl "
    "--eval-data ladder/gsm8k-held-out.jsonl --set data.prompt=question --set data.label=null "
    "--set offline.completion=answer --max-samples 256 --set eval.max_tasks=64 --max-length 384 "
    f"--batch-size 16 --lr 2e-5 --eval-every 8 {_OFFLINE}",
    "rm": f"rm --model ladder/six {_PAIRS} --max-length 64 --batch-size 32 --lr 1e-4 "
    f"--set learner.warmup_steps=5 --eval-every 25 {_OFFLINE}",
    "dpo": f"dpo --model {MODEL} {_PAIRS} --max-length 128 --max-samples 320 "
    f"--set eval.max_tasks=100 --batch-size 16 --lr 1e-5 --eval-every 7 {_OFFLINE}",
    "grpo": f"train --model {MODEL} --data ladder/prompts.jsonl --set data.label=null "
    "--set data.chat_template=false --reward model:ladder/rm/export "
    "--set rewards.0.chat_template=false --set rewards.0.max_length=64 --estimator group_norm "
    f"--steps 15 --groups 4 --group-size 8 --max-new-tokens 32 --lr 2e-5 {_COMMON}",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("prepare", "table", *STAGES))
    what = parser.parse_args().what
    if what == "prepare":
        prepare()
    elif what == "table":
        table()
    else:
        words = [*STAGES[what].split(), "--output", str(FOLDER / what)]
        sys.exit(subprocess.run([sys.executable, "-m", "rlx", *words]).returncode)


def prepare() -> None:
    """Split the data, take prompts from the pairs, and shorten the model."""
    from transformers import AutoTokenizer

    FOLDER.mkdir(exist_ok=True)
    for name, source in (("gsm8k", "gsm8k-train"), ("pairs", "hh-harmless-pairs")):
        rows = [json.loads(line) for line in (DATA / f"{source}.jsonl").open()]
        write(f"{name}-train", rows[:-HELD_OUT])
        write(f"{name}-held-out", rows[-HELD_OUT:])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    pairs = (FOLDER / "pairs-train.jsonl").open()
    prompts = dict.fromkeys(prompt for line in pairs if (prompt := prompt_of(json.loads(line))))
    short = [prompt for prompt in prompts if len(tokenizer(prompt)["input_ids"]) <= 40]
    write("prompts", [{"prompt": prompt} for prompt in short])
    shorten(tokenizer)


def prompt_of(pair: dict[str, str]) -> str | None:
    """What both answers begin with, up to where the assistant speaks last."""
    prompt = pair["chosen"][: pair["chosen"].rindex(MARK) + len(MARK)]
    return prompt if pair["rejected"].startswith(prompt) else None


def shorten(tokenizer: Any) -> None:
    """The first layers of the model, as a model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[:LAYERS]
    model.save_pretrained(FOLDER / "six")
    tokenizer.save_pretrained(FOLDER / "six")


def write(name: str, rows: Iterable[dict[str, Any]]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (FOLDER / f"{name}.jsonl").write_text(text)


def table() -> None:
    """Held-out numbers of each stage by step; of RL the reward."""
    print("| stage | step | numbers |\n|---|---|---|")
    for stage in STAGES:
        path = FOLDER / stage / "metrics.jsonl"
        for record in map(json.loads, path.open()) if path.is_file() else ():
            names = [name for name in record if name.startswith("eval/") or name == "reward/mean"]
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
