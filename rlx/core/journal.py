"""The journal of `rlx generate`: one line for each finished task, appended as soon as it is done.

What was written survives a kill: a line that was cut off is removed when the journal is opened
again, and its task is done once more. Nothing is kept in memory but where each line lies.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

from rlx.core.errors import UsageError
from rlx.core.samples import SampledTask


class Journal:
    """Samples of finished tasks in one file; a context manager that one process holds at a time.

    Raises UsageError when another process writes to it, or when a line is not the journal's.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a+b")
        self._places: dict[int, int] = {}
        """Number of each finished task -> where its line begins."""
        try:
            self._lock()
            self._read()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __contains__(self, number: object) -> bool:
        return number in self._places

    def __len__(self) -> int:
        return len(self._places)

    def add(self, task: SampledTask) -> None:
        """Write a finished task; a task that is there already is left as it is."""
        if task.number in self._places:
            return
        self._file.seek(0, os.SEEK_END)
        self._places[task.number] = self._file.tell()
        self._file.write(task.to_json().encode() + b"\n")
        self._file.flush()

    def __iter__(self) -> Iterator[SampledTask]:
        """The finished tasks in the order of the data."""
        with self._path.open("rb") as file:
            for number in sorted(self._places):
                file.seek(self._places[number])
                yield SampledTask.from_json(file.readline())

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another process writes to {self._path}",
                where="--output",
                fix="wait for it, or another folder",
            ) from None

    def _read(self) -> None:
        self._file.seek(0)
        place = 0
        for line in self._file:
            if not line.endswith(b"\n"):  # cut off by a kill
                self._file.truncate(place)
                return
            try:
                task = SampledTask.from_json(line)
            except (ValueError, KeyError, TypeError) as error:
                raise UsageError(
                    f"{self._path} holds a line at byte {place} that `rlx generate` did not write",
                    where="--output",
                    fix="a new folder",
                ) from error
            self._places.setdefault(task.number, place)
            place += len(line)
