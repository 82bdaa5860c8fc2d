"""How the bytes of a bucket get from one process to others: shared memory, or gloo over TCP."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from rlx.core.engine.transfer.errors import TransferError
from rlx.core.engine.transfer.store import Store

_SPACES = 2
_PATIENCE = timedelta(minutes=2)
"""With a peer that is alive and says nothing in the middle of a bucket."""
_LOOK = 5e-4
_LOOKS_PER_STOP = 20


class Channel(Protocol):
    """One end of a channel; the sender writes into spaces, receivers read them."""

    stays: bool
    """Whether what was sent stays where it is until the next publication."""

    def space(self, bucket: int) -> torch.Tensor:
        """Where a bucket lies: [capacity] uint8. A sender gets it when it may be filled."""
        ...

    def send(self, bucket: int, count: int) -> None:
        """Have the first bytes of a space arrive everywhere."""
        ...

    def receive(self, bucket: int, count: int) -> None:
        """Wait for the first bytes of a space."""
        ...

    def close(self) -> None: ...


class SharedMemory:
    """A file in memory that sender and receivers have mapped, with a place for every tensor.

    It stays for the whole run: new pages of a fresh file would cost ten times the copy, and an
    engine that is started anew finds the weights there.
    """

    stays = True

    def __init__(self, path: Path, size: int, *, create: bool) -> None:
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        try:
            file = os.open(path, flags, 0o600)
        except OSError as error:
            raise TransferError(f"cannot open the shared memory {path}: {error}") from error
        try:
            if create:
                # All of it now: a full /dev/shm would otherwise kill with SIGBUS later.
                os.posix_fallocate(file, 0, size)
            memory = mmap.mmap(file, size)
        except OSError as error:
            path.unlink(missing_ok=True)
            raise TransferError(f"no room for {size} bytes in {path.parent}: {error}") from error
        finally:
            os.close(file)
        self._path, self._created = path, create
        self._whole = torch.frombuffer(memory, dtype=torch.uint8)

    def space(self, bucket: int) -> torch.Tensor:
        return self._whole

    def send(self, bucket: int, count: int) -> None:
        """They are there."""

    def receive(self, bucket: int, count: int) -> None:
        """They are there."""

    def close(self) -> None:
        if self._created:
            self._path.unlink(missing_ok=True)


class Gloo:
    """A process group of its own, beside every other one of the process; rank 0 sends.

    It has two spaces: while one is read the other is filled.

    Args:
        address: of this process, for its peers.
        stop: raises when a wait should end.
    """

    stays = False

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world: int,
        capacity: int,
        address: str,
        stop: Callable[[], None] = lambda: None,
    ) -> None:
        group: Any = dist.ProcessGroupGloo  # type: ignore[attr-defined]
        options = group._Options()
        options._devices = [group.create_device(hostname=address)]
        options._timeout = _PATIENCE
        try:
            self._group = group(store.below("gloo"), rank, world, options)
        except RuntimeError as error:
            raise TransferError(f"rank {rank} of {world} could not join: {error}") from error
        self._spaces = [torch.empty(capacity, dtype=torch.uint8) for _ in range(_SPACES)]
        self._sent: list[Any] = [None] * _SPACES
        self._stop = stop

    def space(self, bucket: int) -> torch.Tensor:
        if (work := self._sent[bucket % _SPACES]) is not None:
            self._wait(work)
            self._sent[bucket % _SPACES] = None
        return self._spaces[bucket % _SPACES]

    def send(self, bucket: int, count: int) -> None:
        self._sent[bucket % _SPACES] = self._broadcast(bucket, count)

    def receive(self, bucket: int, count: int) -> None:
        self._wait(self._broadcast(bucket, count))

    def _broadcast(self, bucket: int, count: int) -> Any:
        options = dist.BroadcastOptions()  # type: ignore[attr-defined]
        options.rootRank = options.rootTensor = 0
        space = self._spaces[bucket % _SPACES][:count]
        try:
            return self._group.broadcast([space], options)
        except RuntimeError as error:
            raise TransferError(f"a bucket could not be broadcast: {_first(error)}") from error

    def _wait(self, work: Any) -> None:
        looks = 0
        while not work.is_completed():
            time.sleep(_LOOK)
            looks += 1
            if looks % _LOOKS_PER_STOP == 0:
                self._stop()
        try:
            work.wait()
        except RuntimeError as error:
            raise TransferError(f"a bucket did not get through: {_first(error)}") from error

    def close(self) -> None:
        # Dropping the group closes its connections. With a broadcast under way that takes until
        # its peers come or the patience ends, and nothing can shorten it.
        holder, self._group = [self._group], None
        threading.Thread(target=holder.clear, daemon=True).start()


def _first(error: BaseException) -> str:
    return str(error).split("\n")[0]
