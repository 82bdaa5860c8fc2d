"""A run from its folder to its last process: what training of every kind has in common."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlx.core.config import RunConfig
from rlx.core.engine.checkpoints import latest_checkpoint, step_of
from rlx.core.engine.collector import unwrap
from rlx.core.engine.crew import Crew, Selected
from rlx.core.engine.driver_watch import DriverWatch
from rlx.core.engine.logs import DriverLog
from rlx.core.engine.reaper import start_reaper, stop_reaper
from rlx.core.engine.reporting import Reporter
from rlx.core.engine.signals import STOPPED, Signals, stopped_by
from rlx.core.engine.trace import TRACE_NAME, Trace
from rlx.core.errors import EngineError, WorkerLostError
from rlx.core.plugins import PluginSystem
from rlx.core.references import ComponentRef
from rlx.core.run import (
    CONFIG_NAME,
    FINISHED_NAME,
    Run,
    make_folder,
    truncate_metrics,
    write_json,
)
from rlx.core.settings import dump_yaml
from rlx.core.stalls import driven


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run leaves behind."""

    folder: Path
    steps: int
    metrics: Mapping[str, float]
    """Of the last step."""
    reason: str
    signal: int | None = None
    """The signal that ended the run, if one did."""


class Loop(Protocol):
    """What a session drives."""

    @property
    def step(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def saving(self) -> bool:
        """Whether it is at what would be lost if it were cut: new weights, or a checkpoint."""
        ...

    def request_stop(self, reason: str) -> None:
        """Ask the loop to end after the last finished step (called from a signal handler)."""
        ...


class Session(ABC):
    """One run: folder, trackers, hooks, workers, signals. A subclass says what is done in it.

    Args:
        config: with `output` set.
        selected: the run's components.
        trackers: those of them that are told what happens.
        checkpoint: where a resumed run goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        selected: Selected,
        trackers: Sequence[ComponentRef],
        plugins: PluginSystem,
        checkpoint: Path | None,
        objective: str | None = None,
    ) -> None:
        assert config.output is not None
        self._config = config
        self._plugins = plugins
        self._checkpoint = checkpoint
        self._objective = objective
        self._folder = config.output.resolve()
        self._reporter = Reporter([ref.resolve() for ref in trackers], log=DriverLog())
        self._crew = Crew(
            config,
            selected,
            plugins=plugins,
            folder=self._folder,
            status=self._reporter.status,
        )
        self._trace = Trace(None)
        self._trainer: Loop | None = None
        self._main: asyncio.Task[Any] | None = None
        self._watch = DriverWatch(config, self._crew, self._folder)
        self._signals = Signals(
            self._on_signal,
            where=lambda: self._watch.where,
            saved=lambda: self._watch.saved,
            saving=self._is_saving,
            stop_timeout=config.faults.stop_timeout,
        )

    @abstractmethod
    async def _work(self, run: Run) -> str:
        """Start the workers and train; sets `_trainer` once it can be stopped in order. Returns
        why it ended."""

    async def run(self) -> TrainResult:
        self._prepare_folder()
        with self._signals, driven(self._watch):
            return await self._run()

    async def _run(self) -> TrainResult:
        run = Run(
            name=self._folder.name,
            folder=self._folder,
            config=self._config,
            start_step=self._first_step(),
            objective=self._objective,
        )
        self._trace = self._open_trace()
        error: BaseException | None = None
        self._reporter.start(run)
        reaper = start_reaper()
        try:
            self._plugins.notify("rlx_on_run_start", run=run)
            self._main = asyncio.ensure_future(self._attempts(run))
            reason = await self._main
            return self._result(reason)
        except BaseException as caught:
            if self._signals.number is not None and isinstance(unwrap(caught), STOPPED):
                return self._result(stopped_by(self._signals.number))
            error = None if isinstance(caught, asyncio.CancelledError) else caught
            raise
        finally:
            await self._crew.close()
            stop_reaper(reaper)
            self._trace.close()
            self._reporter.close(error)
            self._plugins.notify("rlx_on_run_end", run=run, error=error)

    async def _attempts(self, run: Run) -> str:
        """Work; when a worker is lost that only a new start can replace, start anew."""
        while True:
            try:
                return await self._work(run)
            except WorkerLostError as error:
                self._checkpoint = self._restart_after(error)
                self._trainer = None
            await self._crew.end_all()
            truncate_metrics(self._folder, self._first_step())

    def _restart_after(self, lost: WorkerLostError) -> Path | None:
        """The checkpoint to start anew from; raises where the run is to end."""
        settings, faults = self._config.faults, self._crew.faults
        found = latest_checkpoint(self._folder / "checkpoints")
        saved = f"{found.name} is the last whole checkpoint" if found else "there is no checkpoint"
        cause = f"{faults.where}: {lost}"
        interrupted = self._signals.number is not None
        if self._config.runtime.kind == "inline" or settings.learner == "stop" or interrupted:
            raise EngineError(
                f"{cause}; {saved}: the same command with `--resume --output {self._folder}` goes "
                f"on from there. What the worker said last is in {self._folder / 'logs'}."
            ) from lost
        limit = settings.learner_restarts
        if not faults.allows("learner_restarts", limit):
            raise EngineError(
                f"{cause}; starting anew {limit} times did not lead to a new step "
                f"(faults.learner_restarts); {saved}. What the worker said last is in "
                f"{self._folder / 'logs'}."
            ) from lost
        action = f"starting all workers anew from {found.name if found else 'the beginning'}"
        faults.note("learner_restarts", cause=str(lost), action=action, worker=lost.worker)
        return found

    def _open_trace(self) -> Trace:
        settings = self._config.logging
        path = self._folder / TRACE_NAME if settings.trace else None
        return Trace(path, limit=settings.trace_max_mib * 2**20)

    def _first_step(self) -> int:
        return step_of(self._checkpoint) if self._checkpoint else 0

    def _result(self, reason: str) -> TrainResult:
        trainer = self._trainer
        return TrainResult(
            folder=self._folder,
            steps=trainer.step if trainer else self._first_step(),
            metrics=trainer.metrics if trainer else {},
            reason=reason,
            signal=self._signals.number,
        )

    def _prepare_folder(self) -> None:
        make_folder(self._folder)
        (self._folder / FINISHED_NAME).unlink(missing_ok=True)
        (self._folder / CONFIG_NAME).write_text(dump_yaml(self._config))
        truncate_metrics(self._folder, self._first_step() if self._checkpoint else -1)

    def _mark_finished(self, trainer: Loop) -> None:
        """Say on disk that the run did all of its steps."""
        facts = {"step": trainer.step, "metrics": trainer.metrics}
        write_json(self._folder / FINISHED_NAME, facts)

    def _on_signal(self, number: int) -> None:
        """End in order after the first signal."""
        self._reporter.status(f"{stopped_by(number)}: ending after the last finished step")
        if self._trainer is not None:
            self._trainer.request_stop(stopped_by(number))
        elif self._main is not None:
            self._main.cancel()

    def _is_saving(self) -> bool:
        return self._trainer is not None and self._trainer.saving
