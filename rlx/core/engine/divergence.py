"""Notices training that diverges, by metrics beyond their bounds, and says where to go back to."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path

from rlx.core.config import FaultsConfig
from rlx.core.engine.checkpoints import latest_checkpoint
from rlx.core.engine.fault_ledger import FaultLedger
from rlx.core.errors import DivergedError, EngineError, NonFiniteError, did_you_mean


class DivergenceGuard:
    """Looks at each step's metrics.

    Args:
        bounds: metric → largest healthy absolute value.
        steps: steps in a row beyond a bound that mean divergence.
    """

    def __init__(self, bounds: Mapping[str, float], *, steps: int) -> None:
        self._bounds = dict(bounds)
        self._steps = steps
        self._beyond = 0
        self._unknown: set[str] = set()

    @property
    def suspicious(self) -> bool:
        """Whether the last step was beyond a bound; its weights are none to go back to."""
        return self._beyond > 0

    def note(self, step: int, metrics: Mapping[str, float]) -> DivergedError | None:
        """Take in the metrics of a finished step; returns the error once it is one."""
        found = [
            f"{name} is {metrics[name]:.4g}, beyond {bound:g}"
            for name, bound in self._bounds.items()
            if name in metrics and not _within(metrics[name], bound)
        ]
        for name in self._bounds.keys() - metrics.keys() - self._unknown:
            self._unknown.add(name)
            hint = did_you_mean(name, metrics)
            warnings.warn(
                f"faults.bounds: step {step} has no metric {name!r}; {hint}".rstrip("; "),
                stacklevel=2,
            )
        self._beyond = self._beyond + 1 if found else 0
        if self._beyond < self._steps:
            return None
        return DivergedError(
            f"training diverges: {' and '.join(found)} after step {step}, the "
            f"{_ordinal(self._beyond)} step in a row beyond a bound (faults.bounds)",
            last_good=step - self._beyond,
        )

    def reset(self) -> None:
        """Other weights: what was noted of the old ones does not count."""
        self._beyond = 0


def checkpoint_to_return_to(
    error: DivergedError | NonFiniteError,
    *,
    step: int,
    checkpoints: Path,
    settings: FaultsConfig,
    ledger: FaultLedger,
) -> Path:
    """The last whole checkpoint from before training went wrong; notes that it is returned to.

    Args:
        step: last finished step.

    Raises:
        DivergedError, NonFiniteError: `error`, where `faults.divergence` says to stop.
        EngineError: there is no such checkpoint, or going back has not helped.
    """
    if settings.divergence != "rollback":
        raise error
    last_good = error.last_good if isinstance(error, DivergedError) else step
    folder = latest_checkpoint(checkpoints, at_most=last_good)
    if folder is None:
        raise EngineError(
            f"{error}; there is no whole checkpoint of step {last_good} or before to go back to"
        ) from error
    if not ledger.allows("rollbacks", settings.rollbacks):
        raise EngineError(
            f"{error}; going back {settings.rollbacks} times did not help (faults.rollbacks): "
            f"{folder.name} is the last good checkpoint; a lower learner.lr may help"
        ) from error
    action = f"going back to {folder.name}, and on with other tasks"
    ledger.note("rollbacks", cause=str(error), action=action)
    return folder


def _within(value: float, bound: float) -> bool:
    return math.isfinite(value) and abs(value) <= bound


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")
