"""The embedded task: do as the first word says to a few letters.

    reverse kfbao=   →  oabfk
    sort kfbao=      →  abfko
    next kfbao=      →  lgcbp      (each letter's successor, z → a)

A row's `label` is the only right answer, so the reward `exact_match` verifies it. `kind` is the
instruction, `level` the number of letters: columns to break a metric down by. Training and test
rows never share a string of letters, whatever the kind.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from string import ascii_lowercase
from typing import Any

LEVELS = (4, 5, 6, 7)
ROWS = {"train": 8192, "test": 1024}
_TEST_SHARE = 8  # one string in eight belongs to the test split


def reverse(letters: str) -> str:
    return letters[::-1]


def sort(letters: str) -> str:
    return "".join(sorted(letters))


def following(letters: str) -> str:
    return "".join(ascii_lowercase[(ord(c) - ord("a") + 1) % 26] for c in letters)


KINDS: dict[str, Callable[[str], str]] = {"reverse": reverse, "sort": sort, "next": following}


def draw(rng: random.Random, split: str = "train") -> dict[str, Any]:
    """One row of `split`, with the columns prompt, label, kind, level and letters."""
    kind, level = rng.choice(list(KINDS)), rng.choice(LEVELS)
    while True:
        letters = "".join(rng.choices(ascii_lowercase, k=level))
        if (zlib.crc32(letters.encode()) % _TEST_SHARE == 0) == (split == "test"):
            break
    return {
        "prompt": f"{kind} {letters}=",
        "label": KINDS[kind](letters),
        "kind": kind,
        "level": level,
        "letters": letters,
    }


def load(*, split: str = "train", rows: int | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """The rows of a split (`train` or `test`), the same ones on every call.

    `rows` unset gives 8,192 training or 1,024 test rows. Raises KeyError for another split.
    """
    count = ROWS[split] if rows is None else min(rows, ROWS[split])
    rng = random.Random(f"{split}-{seed}")
    return [draw(rng, split) for _ in range(count)]
