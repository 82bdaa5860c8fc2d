"""Which step's weights did best on held-out data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rlx.core.errors import UsageError, did_you_mean
from rlx.core.evaluation import lower_is_better


class Best:
    """Keeps the step with the highest value of a metric; of a loss, with the lowest.

    Args:
        metric: its name; None: no step is best.
    """

    def __init__(self, metric: str | None) -> None:
        self._metric = metric
        self._sign = -1.0 if metric is not None and lower_is_better(metric) else 1.0
        self._value = float("-inf")
        self.step: int | None = None
        """The first of equals."""

    @property
    def source(self) -> str | None:
        """Name of the held-out data that the metric is of (`eval/<source>/…`)."""
        return None if self._metric is None else self._metric.split("/", 2)[1]

    def check(self, metrics: Collection[str]) -> None:
        """Raise UsageError when evaluation, which gives `metrics`, does not give this one."""
        if self._metric is not None and self._metric not in metrics:
            raise UsageError(
                f"evaluation gives no metric {self._metric!r}",
                where="checkpoint.best",
                fix=did_you_mean(self._metric, metrics) or f"one of: {', '.join(sorted(metrics))}",
            )

    def note(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the results of an evaluation; raises UsageError when the metric is not in them."""
        if self._metric is None:
            return
        self.check(metrics)
        value = self._sign * metrics[self._metric]
        if value > self._value:
            self._value, self.step = value, step

    def state_dict(self) -> dict[str, Any]:
        return {"value": self._value, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._value, self.step = state["value"], state["step"]
