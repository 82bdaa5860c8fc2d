"""The reward of the speed comparison, as TRL calls it; rlx takes it as it is (`trl:`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def vowels(completions: Sequence[str], **columns: Any) -> list[float]:
    """Share of vowels among the letters: any answers differ in it, and it costs nothing."""
    return [sum(letter in "aeiou" for letter in text) / (len(text) or 1) for text in completions]
