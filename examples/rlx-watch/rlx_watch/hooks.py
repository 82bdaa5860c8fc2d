"""Hooks: end a run that is solved or stuck, and measure how varied its answers are.

Hook plugins have no parameters on the command line; these two environment variables are read when
a run starts:

    RLXWATCH_TARGET     stop once the mean reward is at least this (unset: never)
    RLXWATCH_PATIENCE   stop after this many steps without a better mean reward (unset: never)
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import rlx
from rlx_watch.progress import REWARD, Progress, read

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlx import Group, RunConfig, RunView, TrainBatch


class Watch:
    """The hook plugin; one instance serves a process."""

    def __init__(self) -> None:
        self.target: float | None = None
        self.patience: float | None = None
        self.progress = Progress()
        self.distinct = 0.0

    @rlx.hookimpl
    def rlx_configure(self, config: RunConfig) -> None:
        """Check the settings before the run costs anything."""
        self.target = _number("RLXWATCH_TARGET")
        self.patience = _number("RLXWATCH_PATIENCE")
        if self.patience is not None and self.patience < 1:
            raise rlx.UsageError(
                f"a patience of {self.patience:g} ends every run at its first step",
                where="RLXWATCH_PATIENCE",
                fix="1 or more, or unset it",
            )

    @rlx.hookimpl
    def rlx_on_run_start(self, run: RunView) -> None:
        """Begin anew, or where an earlier part of the run left off."""
        metrics = run.folder / "metrics.jsonl"
        self.progress = read(metrics) if run.start_step and metrics.is_file() else Progress()

    @rlx.hookimpl
    def rlx_on_rollouts(self, groups: Sequence[Group]) -> None:
        shares = [len({r.text for r in group.rollouts}) / len(group.rollouts) for group in groups]
        self.distinct = sum(shares) / len(shares)

    @rlx.hookimpl
    def rlx_step_metrics(self, batch: TrainBatch) -> Mapping[str, float]:
        """Logged as `rlx-watch/distinct` and `rlx-watch/longest`."""
        return {"distinct": self.distinct, "longest": float(batch.action_lengths.max())}

    @rlx.hookimpl
    def rlx_should_stop(self, step: int, metrics: Mapping[str, float]) -> str | None:
        self.progress.see(step, metrics.get(REWARD))
        if self.target is not None and self.progress.reward >= self.target:
            return f"the mean reward has reached {self.target:g}"
        if self.patience is not None and self.progress.stalled >= self.patience:
            return f"no better mean reward for {self.progress.stalled} steps"
        return None


def _number(variable: str) -> float | None:
    text = os.environ.get(variable, "")
    try:
        return float(text) if text else None
    except ValueError as error:
        raise rlx.UsageError(f"{text!r} is no number", where=variable, fix="0.9") from error


watch = Watch()
