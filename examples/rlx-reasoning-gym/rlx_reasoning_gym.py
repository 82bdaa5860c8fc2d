"""Any task of reasoning-gym as rlx data (`load`) and its verifier as an rlx reward (`verify`).

Source: Stojanovski et al. 2025, "Reasoning Gym" (arXiv:2505.24760).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

from rlx import Reward, RewardInputs, UsageError, component

_SEEDS = {"train": 0, "test": 1_000_003}
"""What is added to the seed: no row of one split is in the other, but where a task has few."""


def load(
    *,
    task: str,
    size: int = 4096,
    seed: int = 0,
    split: str = "train",
    config: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Rows of a task: `prompt`, `label`, the metadata that are plain values, and `entry` (JSON).

    Args:
        task: its name in reasoning-gym, for example `spell_backward`.
        size: rows.
        config: settings of the task, for example `{min_word_len: 4}`.

    Raises UsageError for an unknown task or setting, KeyError for an unknown split.
    """
    import reasoning_gym

    offset = _SEEDS[split]
    try:
        rows = reasoning_gym.create_dataset(task, size=size, seed=seed + offset, **(config or {}))
    except (ValueError, TypeError, AssertionError) as error:
        raise UsageError(str(error), where="data.params") from error
    return [_row(task, entry) for entry in rows]


def _row(task: str, entry: dict[str, Any]) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in entry["metadata"].items()
        if isinstance(value, (str, int, float, bool))
    }
    return {
        **plain,
        "prompt": entry["question"],
        "label": entry["answer"],
        "task": task,
        "entry": json.dumps(entry, default=str),
    }


@component(needs_label=True, example_columns={"task": "spell_backward", "entry": '{"answer": "4"}'})
def verify(sample: RewardInputs, *, tag: str = "answer") -> Reward:
    """The task's own score of the answer, 0 to 1.

    Args:
        tag: the answer is what stands in the last `<tag>…</tag>`, else the whole response.
    """
    _, opened, after = sample.response.rpartition(f"<{tag}>")
    answer = (after.partition(f"</{tag}>")[0] if opened else sample.response).strip()
    score = _scorer(sample.task["task"])(answer, json.loads(sample.task["entry"]))
    return Reward(float(score), metrics={"solved": float(score >= 1.0)})


@functools.cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    """The task's verifier; making one may read files."""
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(task)
