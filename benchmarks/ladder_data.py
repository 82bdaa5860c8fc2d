"""Data and starting models of the ladder's stages (`benchmarks.ladder`)."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

HELD_OUT = 200
HELD_OUT_PROMPTS = 64
LAYERS = 6
_TURN = "\n\nAssistant:"
_NOTES = re.compile(r"<<.*?>>")


def prepare(data: Path, folder: Path, model: str) -> None:
    """Split the data, make rows for each objective from it, and shorten the model."""
    from transformers import AutoTokenizer

    folder.mkdir(exist_ok=True)
    solved = read(data / "gsm8k-train.jsonl")
    judged = read(data / "hh-harmless-pairs.jsonl")
    prompts = list(short_prompts(judged, model))
    write(folder / "prompts-train.jsonl", prompts[:-HELD_OUT_PROMPTS])
    write(folder / "prompts-held-out.jsonl", prompts[-HELD_OUT_PROMPTS:])
    for part, rows in (("train", slice(None, -HELD_OUT)), ("held-out", slice(-HELD_OUT, None))):
        write(folder / f"gsm8k-{part}.jsonl", solved[rows])
        write(folder / f"pairs-{part}.jsonl", judged[rows])
        write(folder / f"unpaired-{part}.jsonl", unpaired(judged[rows]))
        write(folder / f"steps-{part}.jsonl", judged_steps(solved[rows]))
    shorten(model, folder / "six", AutoTokenizer.from_pretrained(model))


def short_prompts(pairs: Iterable[dict[str, str]], model: str) -> Iterator[dict[str, str]]:
    """Dialogues of at most 40 tokens, up to where the assistant speaks last; each one once."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    for prompt in dict.fromkeys(prompt_of(pair) for pair in pairs):
        if prompt and len(tokenizer(prompt)["input_ids"]) <= 40:
            yield {"prompt": prompt}


def prompt_of(pair: dict[str, str]) -> str | None:
    """What both answers begin with, up to where the assistant speaks last."""
    prompt = pair["chosen"][: pair["chosen"].rindex(_TURN) + len(_TURN)]
    return prompt if pair["rejected"].startswith(prompt) else None


def unpaired(pairs: Iterable[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Of each pair in turn the chosen answer (good) and the rejected one (bad)."""
    for index, pair in enumerate(pairs):
        prompt = prompt_of(pair)
        if prompt is not None:
            good = index % 2 == 0
            completion = pair["chosen" if good else "rejected"][len(prompt) :]
            yield {"prompt": prompt, "completion": completion, "label": good}


def judged_steps(solved: list[dict[str, str]]) -> Iterator[dict[str, Any]]:
    """Solutions by steps; every second one goes on, from a random step, with another's steps.

    Those are false: they are sound sentences and sums, but of another problem.
    """
    draw = random.Random(0)
    solutions = [_steps(row["answer"]) for row in solved]
    for index, (row, steps) in enumerate(zip(solved, solutions, strict=True)):
        right = draw.randrange(len(steps)) if index % 2 else len(steps)
        foreign = solutions[(index + 1) % len(solutions)]
        shown = steps[:right] + foreign[right:] if right < len(foreign) else steps
        yield {
            "prompt": row["question"],
            "completions": shown,
            "labels": [place < right or shown is steps for place in range(len(shown))],
        }


def _steps(solution: str) -> list[str]:
    """Lines of a GSM8K solution, without its answer and the calculator's notes."""
    return [_NOTES.sub("", line) for line in solution.split("\n")[:-1]]


def shorten(model: str, folder: Path, tokenizer: Any) -> None:
    """The first layers of the model, as a model."""
    from transformers import AutoModelForCausalLM

    short = AutoModelForCausalLM.from_pretrained(model)
    short.model.layers = short.model.layers[:LAYERS]
    short.config.num_hidden_layers = LAYERS
    if getattr(short.config, "layer_types", None):
        short.config.layer_types = short.config.layer_types[:LAYERS]
    short.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def read(path: Path) -> list[dict[str, Any]]:
    with path.open() as lines:
        return [json.loads(line) for line in lines]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
