"""A finished step of reinforcement learning as metrics and records of its rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.core.config import LoggingConfig
from rlx.core.engine.collector import Collected
from rlx.core.engine.interfaces import UpdateResult
from rlx.core.engine.metrics import merge
from rlx.core.engine.phases import Phases
from rlx.core.engine.records import Decode, rollout_records
from rlx.core.engine.step_report import StepReport
from rlx.core.rollouts import TrainBatch

Source = Callable[[], Mapping[str, float]]


class Emission:
    """Joins the numbers of a step with those of its parts, and hands them on.

    Args:
        sources: each gives metrics of what happened since its last call.
    """

    def __init__(
        self,
        report: StepReport,
        phases: Phases,
        *,
        logging: LoggingConfig,
        decode: Decode,
        sources: Sequence[Source],
    ) -> None:
        self._report = report
        self._phases = phases
        self._logging = logging
        self._decode = decode
        self._sources = sources
        self.metrics: dict[str, float] = {}
        """Of the last step."""

    def emit(
        self,
        step: int,
        numbers: Mapping[str, float],
        *,
        collected: Collected,
        batch: TrainBatch,
        update: UpdateResult,
    ) -> str | None:
        """Tell of `step`; returns why a plugin wants the run to end, if one does."""
        seconds = self._phases.seconds
        times = {**self._phases.times, "rollout": collected.rollout_seconds}
        if collected.reward_seconds is not None:
            times["reward"] = collected.reward_seconds
        self.metrics = merge(
            numbers,
            *(source() for source in self._sources),
            {f"time/{name}": value for name, value in times.items() if name != "advantage"},
            {
                "time/step": seconds,
                "throughput/rollouts_per_s": batch.rollout_count / seconds,
                "throughput/tokens_per_s": batch.action_count / seconds,
            },
        )
        records = self._records(collected, batch, update)
        return self._report.emit(step, self.metrics, seconds=seconds, records=records)

    def _records(
        self, collected: Collected, batch: TrainBatch, update: UpdateResult
    ) -> list[dict[str, Any]] | None:
        """The rollouts that are logged, if any are."""
        if not self._logging.rollouts:
            return None
        assert update.logprobs is not None
        return rollout_records(
            collected.groups,
            batch,
            update.logprobs,
            decode=self._decode,
            limit=None if self._logging.rollouts == "complete" else self._logging.rollouts_per_step,
        )
