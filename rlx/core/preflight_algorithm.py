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


def check_kl_gradient(case: Case) -> Iterator[Finding]:
    """As a term of the loss, k1 has a gradient of expectation 0 (see `kl_penalty`)."""
    kl = case.config.kl
    if kl.coef > 0 and kl.placement == "loss" and kl.estimator == "k1":
        yield warning(
            "k1 in the loss holds nothing back: its gradient is 0 on average",
            "kl.estimator",
            "`--set kl.estimator=k2` (the reverse KL) or k3, or `--set kl.placement=reward`",
        )
