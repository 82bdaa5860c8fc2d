"""Whether the settings of the objective have an effect together."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.component import tags_of
from rlx.core.preflight_case import Case, Finding, warning


def check_old_logprobs(case: Case) -> Iterator[Finding]:
    """Where the engine's log-probs are the old ones, there is no mismatch left to correct."""
    if case.config.algorithm.old_logprobs != "rollout":
        return
    correction = case.selection.correction
    if tags_of(correction.load()).extra.get("ratio") != "none":
        yield warning(
            f"the correction {correction.name} has no effect with old_logprobs `rollout`: the "
            "engine's log-probs stand in for the learner's, so all its weights are 1",
            "algorithm.old_logprobs",
            "`auto` or `recompute`, or leave out the correction",
        )
