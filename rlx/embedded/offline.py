"""Rows for offline training on the embedded task: demonstrations, preferences, judgements, steps.

The right answer of a row is the label of the same row of `rlx.embedded.task`; in a wrong one, one
letter is replaced by another. All are the same on every call.
"""

from __future__ import annotations

import random
from string import ascii_lowercase
from typing import Any

from rlx.embedded import task


def conversations(*, split: str = "train") -> list[dict[str, Any]]:
    """Rows of prompt and completion, the right answer."""
    return [{"prompt": row["prompt"], "completion": row["label"]} for row in task.load(split=split)]


def pairs(*, split: str = "train") -> list[dict[str, Any]]:
    """Rows of prompt, chosen (right) and rejected (wrong)."""
    rng = random.Random(f"pairs-{split}")
    return [
        {"prompt": row["prompt"], "chosen": row["label"], "rejected": _wrong(row["label"], rng)}
        for row in task.load(split=split)
    ]


def unpaired(*, split: str = "train") -> list[dict[str, Any]]:
    """Rows of prompt, completion and label: whether it is right, which every other one is."""
    rng = random.Random(f"unpaired-{split}")
    return [
        {
            "prompt": row["prompt"],
            "completion": row["label"] if number % 2 == 0 else _wrong(row["label"], rng),
            "label": number % 2 == 0,
        }
        for number, row in enumerate(task.load(split=split))
    ]


def steps(*, split: str = "train") -> list[dict[str, Any]]:
    """Rows of prompt, completions (a letter each) and labels: whether each letter is right."""
    rng = random.Random(f"steps-{split}")
    rows = []
    for number, row in enumerate(task.load(split=split)):
        answer = row["label"] if number % 2 == 0 else _wrong(row["label"], rng)
        labels = [one == right for one, right in zip(answer, row["label"], strict=True)]
        rows.append({"prompt": row["prompt"], "completions": list(answer), "labels": labels})
    return rows


def _wrong(answer: str, rng: random.Random) -> str:
    place = rng.randrange(len(answer))
    letter = rng.choice([one for one in ascii_lowercase if one != answer[place]])
    return answer[:place] + letter + answer[place + 1 :]
