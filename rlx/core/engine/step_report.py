"""Who hears of a finished step: trace, trackers, plugins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.engine.monitor import Monitor
from rlx.core.engine.reporting import Reporter
from rlx.core.plugins import PluginSystem
from rlx.core.run import Run


class StepReport:
    """Hands on the numbers of finished steps."""

    def __init__(
        self, run: Run, *, reporter: Reporter, monitor: Monitor, plugins: PluginSystem
    ) -> None:
        self._run = run
        self._reporter = reporter
        self._monitor = monitor
        self._plugins = plugins

    def emit(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        seconds: float,
        records: Sequence[Mapping[str, Any]] | None = None,
    ) -> str | None:
        """Tell everybody; returns why a plugin wants the run to end, if one does.

        Args:
            seconds: that the step took.
            records: of its rollouts, where they are logged.
        """
        self._monitor.step(step, seconds)
        self._reporter.log(step, metrics)
        if records is not None:
            self._reporter.log_samples(step, records)
        self._plugins.notify("rlx_on_step_end", run=self._run, step=step, metrics=metrics)
        return self._plugins.stop_reason(run=self._run, step=step, metrics=metrics)
