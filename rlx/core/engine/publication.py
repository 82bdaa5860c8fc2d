"""Gives a learner's new weights to the rollout engines: a safetensors file in shared memory.

The file stays until the next one is taken, for an engine that has to be started anew.
"""

from __future__ import annotations

import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.errors import EngineError

_PREFIX = "rlx-weights-"


class Publisher:
    """Writes, hands over, compares checksums, removes. One host; the file never touches a disk.

    Args:
        keep: leave the weights published last where they are.
    """

    def __init__(self, *, keep: bool = False) -> None:
        root = shared_memory_root()
        remove_stale(root)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=root))
        self._numbers = itertools.count()  # a version may be published again, after a rollback
        self._keep = keep
        self._kept: Path | None = None
        self._metrics: dict[str, float] = {}

    async def publish(
        self, learner: LearnerGroup, engines: RolloutEngines, *, version: int
    ) -> None:
        """Replace the engines' weights by the learner's; raises `EngineError` when they differ."""
        path = self._folder / f"policy-{version}-{next(self._numbers)}.safetensors"
        try:
            written = await learner.write_weights(str(path), version)
            reports = await engines.load_weights(written)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        old, self._kept = (self._kept, path) if self._keep else (path, None)
        if old is not None:
            old.unlink(missing_ok=True)
        for number, report in enumerate(reports):
            if report.checksum != written.checksum:
                raise EngineError(
                    f"publication of version {version}: engine {number} received other weights "
                    f"than the learner wrote (checksum {report.checksum} instead of "
                    f"{written.checksum})"
                )
        seconds = written.seconds + max(report.seconds for report in reports)
        self._metrics = {"publish/gib_per_s": written.bytes / 2**30 / max(seconds, 1e-9)}

    def metrics(self) -> Mapping[str, float]:
        return self._metrics

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def shared_memory_root() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def remove_stale(root: Path) -> None:
    """Remove what killed runs left in shared memory (their process is gone)."""
    for folder in root.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
