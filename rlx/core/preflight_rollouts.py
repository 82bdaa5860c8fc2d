"""What is checked of how rollouts come about: sampling, generation ahead, recordings."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.preflight_case import Case, Finding, error, warning
from rlx.core.preflight_folder import recorded_steps


def check_staleness(case: Case) -> Iterator[Finding]:
    """What concerns generation ahead of training is of use only there; a step fits in flight."""
    rollout = case.config.rollout
    if not rollout.max_staleness:
        for key in ("partial_rollout", "max_in_flight"):
            if getattr(rollout, key):
                yield warning(
                    f"rollout.{key} has no effect: generation and training take turns",
                    f"rollout.{key}",
                    "`--set rollout.max_staleness=1` lets generation run ahead",
                )
        return
    if case.config.algorithm.old_logprobs == "rollout":
        yield warning(
            "the ratio is taken to the engine's log-probs, so the correction of stale rollouts is "
            "1 everywhere",
            "algorithm.old_logprobs",
            "`auto`, which takes it to the learner's",
        )


def check_sampling(case: Case) -> Iterator[Finding]:
    """The learner computes probabilities over the whole vocabulary at the sampling temperature."""
    rollout, algorithm = case.config.rollout, case.config.algorithm
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        value = getattr(rollout, key)
        if value == off:
            continue
        what = (
            f"{key} {value} samples from a cut distribution, while the learner's probabilities are "
            "of the whole one"
        )
        if algorithm.old_logprobs == "rollout":
            yield error(
                f"{what}; with old_logprobs `rollout` every ratio would be wrong",
                f"rollout.{key}",
                f"`--set rollout.{key}={off:g}`, or `--set algorithm.old_logprobs=recompute`",
            )
        else:
            yield warning(
                f"{what}: rollouts are slightly off policy",
                f"rollout.{key}",
                f"`--set rollout.{key}={off:g}` for exactness",
            )


def check_replay(case: Case) -> Iterator[Finding]:
    """A recording has all steps; nothing is asked for that needs an engine."""
    config = case.config
    if config.replay is None:
        return
    recorded = recorded_steps(config.replay)
    if recorded == 0:
        yield error(
            f"{config.replay} has no complete rollouts",
            "replay",
            "a run that was trained with `--set logging.rollouts=complete`",
        )
    elif config.steps > recorded:
        yield error(
            f"{config.replay} has complete rollouts of {recorded} steps, not of {config.steps}",
            "steps",
            f"`--steps {recorded}`",
        )
    if config.eval.sources:
        yield warning(
            "a replay has no engine to evaluate with",
            "eval.sources",
            "`rlx eval` with the finished run",
        )
