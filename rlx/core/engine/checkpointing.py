"""When a run's checkpoints are written: while training waits, or beside it.

The state is held in memory first, which takes a moment and stops training; then it is written. With
`checkpoint.asynchronous` that is done by threads of driver and learners while training goes on, one
checkpoint at a time: the next one, the end of the run and a stop wait for it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rlx.core.config import CheckpointConfig
from rlx.core.engine.checkpoints import CheckpointError, packed_state, save_checkpoint
from rlx.core.engine.interfaces import FileMarks
from rlx.core.errors import RlxError


class Holder(Protocol):
    """The ranks of a model, as checkpoints see them."""

    async def hold(self, *, copy: bool, export: bool) -> None:
        """Take hold of the state in memory."""
        ...

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        """Write what is held; returns what files must turn out to be."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What a checkpoint holds of the models: `policy/`, perhaps `critic/`, and what others load."""

    policy: Holder
    critic: Holder | None = None
    folder: str
    """Name of the folder for others: the policy's model, or its adapter."""

    async def hold(self, *, copy: bool) -> None:
        await self.policy.hold(copy=copy, export=True)
        if self.critic is not None:
            await self.critic.hold(copy=copy, export=False)

    async def write(self, folder: str) -> FileMarks:
        written = await self.policy.write_held(f"{folder}/policy", f"{folder}/{self.folder}")
        marks = {f"policy/{name}": mark for name, mark in written.items()}
        if self.critic is not None:
            written = await self.critic.write_held(f"{folder}/critic", None)
            marks |= {f"critic/{name}": mark for name, mark in written.items()}
        return marks


class Checkpointing:
    """Writes a run's checkpoints, at most one at a time.

    Args:
        root: folder of the checkpoints.
        status: told what happens.
        written: told of each checkpoint that is whole: its step and its folder.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointConfig,
        models: Models,
        *,
        status: Callable[[str], None],
        written: Callable[[int, Path], None],
    ) -> None:
        self._root = root
        self._settings = settings
        self._models = models
        self._status = status
        self._written = written
        self._saved: int | None = None
        self._holding = False
        self._flight: asyncio.Task[None] | None = None
        self._failure: RlxError | None = None
        self._failed = 0
        self._seconds: float | None = None

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being held or written."""
        return self._holding or self._flight is not None

    def start_from(self, step: int) -> None:
        """The run goes on from the checkpoint of this step."""
        self._saved = step

    async def save(
        self, step: int, state: Mapping[str, Any], *, best: int | None, last: bool = False
    ) -> None:
        """Save the state after `step`, unless that is done or under way.

        Args:
            state: of the driver, of primitives, containers of them, and tensors.
            best: step of the best checkpoint so far.
            last: nothing follows: return when it is on disk, and raise whatever went wrong.

        Raises:
            CheckpointError: it can't be written, and `checkpoint.on_failure` is `raise`.
        """
        await self.settle()
        if self._saved == step:
            return
        self._status("writing a checkpoint")
        beside = self._settings.asynchronous and not last
        packed = packed_state(state)
        self._holding = True
        try:
            await self._models.hold(copy=beside)
        finally:
            self._holding = False
        self._saved = step
        self._flight = asyncio.get_running_loop().create_task(self._write(step, packed, best))
        if not beside:
            await self.settle(strictly=last)

    async def settle(self, *, strictly: bool = False) -> None:
        """Wait for what is being written; raises what went wrong as the settings say."""
        if self._flight is not None:
            await asyncio.wait([self._flight])
        self.check(strictly=strictly)

    def check(self, *, strictly: bool = False) -> None:
        """Raise what went wrong in the meantime, as the settings say; waits for nothing.

        Raises:
            CheckpointError: a checkpoint could not be written.
        """
        failure, self._failure = self._failure, None
        if failure is not None and (strictly or self._settings.on_failure == "raise"):
            raise failure

    async def close(self) -> None:
        """Wait for what is being written, whatever becomes of it."""
        if self._flight is not None:
            await asyncio.wait([self._flight])

    def take_metrics(self) -> dict[str, float]:
        """Of the checkpoint that was finished since the last call, and failures so far."""
        found = {}
        if self._seconds is not None:
            found["time/checkpoint_write"] = self._seconds
        if self._failed:
            found["checkpoint/failed"] = float(self._failed)
        self._seconds = None
        return found

    async def _write(self, step: int, packed: bytes, best: int | None) -> None:
        started = time.perf_counter()
        write: Callable[[str], Awaitable[FileMarks]] = self._models.write
        try:
            path = await save_checkpoint(
                self._root, step, packed, write, keep=self._settings.keep, best=best
            )
        except Exception as error:
            self._note(step, error)
            return
        finally:
            self._flight = None
        self._seconds = time.perf_counter() - started
        self._written(step, path)

    def _note(self, step: int, error: Exception) -> None:
        """Remember that a checkpoint failed; the last good one is still there."""
        self._failed += 1
        if self._saved == step:
            self._saved = None
        if isinstance(error, RlxError):
            self._failure = error
        else:
            self._failure = CheckpointError(str(error))
            self._failure.__cause__ = error
        self._status(f"the checkpoint of step {step} was not written: {error}")
