"""What the threads that watch a run's event loop need of it (`rlx.core.overdue.Driven`)."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from rlx.core.config import RunConfig
from rlx.core.engine.checkpoints import checkpoints, step_of
from rlx.core.engine.crew import Crew
from rlx.core.engine.signals import end_now, tell

_files = logging.getLogger("rlx.driver")
_terminal = logging.getLogger("rlx.core.stalls")


class DriverWatch:
    """Says, writes and ends what is asked of it, in any thread."""

    def __init__(self, config: RunConfig, crew: Crew, folder: Path) -> None:
        self.timeout = config.faults.component_timeout
        self.ends = config.runtime.kind != "inline"
        self._crew = crew
        self._folder = folder

    @property
    def where(self) -> str:
        return self._crew.faults.where

    @property
    def next_step(self) -> str:
        return f"the same command with `--resume --output {self._folder}` goes on"

    @property
    def saved(self) -> str:
        """What is on disk, and how to go on; a clause."""
        steps = [step_of(path) for path in checkpoints(self._folder / "checkpoints")]
        if not steps:
            return "there is no checkpoint yet"
        return (
            f"the last checkpoint is of step {max(steps)}, and the same command with "
            f"`--resume --output {self._folder}` goes on from there"
        )

    def tell(self, text: str) -> None:
        """In a thread of its own: what blocks the loop may hold a lock of Python's logging."""

        def write() -> None:
            _terminal.warning("%s", text)
            _files.info("%s", text)

        threading.Thread(target=write, name="rlx-tell", daemon=True).start()

    def write_stacks(self, loop: asyncio.AbstractEventLoop) -> str:
        try:
            return f"; the stacks of driver and workers are in {self._crew.write_stacks(loop)}"
        except OSError as error:
            return f"; the stacks can't be written ({error})"

    def cut(self, why: str) -> None:
        tell(why)
        end_now(1)
