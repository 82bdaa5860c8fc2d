"""Penalty on repeated n-grams: arXiv:2502.03373 (Demystifying long chain-of-thought), section 5.

penalty = max_penalty * (1 - distinct n-grams / n-grams)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from rlx.core.component import component
from rlx.core.rewards import RewardInputs


@component
def repetition(
    sample: RewardInputs,
    *,
    n: Annotated[int, Field(ge=1)] = 3,
    max_penalty: Annotated[float, Field(le=0)] = -1.0,
    unit: Literal["word", "token"] = "word",
) -> float:
    """Penalty in (max_penalty, 0]: 0 without a repeated n-gram, or when there is none at all.

    Args:
        n: length of the n-grams.
        max_penalty: what a response of one endlessly repeated n-gram tends to.
        unit: n-grams of lower-cased words of the response, or of action tokens.
    """
    items: Sequence[object] = (
        sample.response.lower().split() if unit == "word" else [int(t) for t in sample.tokens]
    )
    grams = [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]
    return max_penalty * (1 - len(set(grams)) / len(grams)) if grams else 0.0
