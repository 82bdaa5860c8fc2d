"""Whether the settings of evaluation fit together."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.config import RunConfig

Complaint = tuple[str, str, str]
"""What is wrong, the setting that it is about, and what to do."""


def eval_complaints(config: RunConfig, *, context: int) -> Iterator[Complaint]:
    """Yield what stands in the way of evaluating; `context` is the engine's."""
    eval_ = config.eval
    if not eval_.sources:
        wishes = {
            "eval.every": eval_.every > 0,
            "eval.before_training": eval_.before_training,
            "checkpoint.best": config.checkpoint.best is not None,
        }
        for key in [key for key, wanted in wishes.items() if wanted][:1]:
            yield (
                f"{key} is set, and there is no data to evaluate on",
                key,
                "`--eval-data FILE` (or eval.sources in a file)",
            )
        return
    temperature = eval_.sampling_temperature(config.rollout.temperature)
    if eval_.samples > 1 and temperature == 0:
        yield (
            f"{eval_.samples} greedy samples of a task would all be the same",
            "eval.temperature",
            "a temperature above 0, or one sample",
        )
    new_tokens = eval_.max_new_tokens or 0
    if new_tokens >= context:
        yield (
            f"{new_tokens} new tokens leave no room for a prompt in a context of {context}",
            "eval.max_new_tokens",
            f"at most {context - 1}; prompts need room too",
        )
