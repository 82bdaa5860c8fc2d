"""Whether `faults.*` fits the run: what is to be gone back to must be there."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.core.config import RunConfig
from rlx.core.preflight_case import Case, Finding, error, warning

_EVERY = "`--checkpoint-every N`"


def check_faults(case: Case) -> Iterator[Finding]:
    """Yield what is wrong with `faults.*`, and what has no effect."""
    config = case.config
    yield from restart_findings(config)
    if config.faults.divergence == "rollback":
        if not config.checkpoint.every:
            yield error(
                "there are no checkpoints to roll back to while the run goes on",
                "faults.divergence",
                f"{_EVERY} with it",
            )
        if config.replay is not None:
            yield error(
                "recorded rollouts would lead to the same place again after a rollback",
                "faults.divergence",
                "`stop`, or a run with an engine",
            )


def restart_findings(config: RunConfig) -> Iterator[Finding]:
    """The same of `faults.learner`, for training of every kind."""
    if config.faults.learner != "restart":
        return
    if config.runtime.kind == "inline":
        yield warning(
            "faults.learner has no effect: inline, a learner that dies takes the driver with it",
            "faults.learner",
            "`--runtime ray`",
        )
    elif not config.checkpoint.every:
        yield error(
            "a learner can't be started anew from a checkpoint: none is written while the run "
            "goes on",
            "faults.learner",
            f"{_EVERY} with it",
        )
