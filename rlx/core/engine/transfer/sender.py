"""The learner's end: weights into buckets, buckets to every receiver.

`Sender.send`
  consumes:      the tensors of a source, block by block
  waits for:     every receiver, until it is ready; with gloo for a space that all have received
  unblocked by:  receivers; `abort`, with an error
  produces:      buckets, and the report about them
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

import psutil
import torch

from rlx.core.engine.interfaces import SentWeights, WeightsLink, WeightsUpdate
from rlx.core.engine.transfer.buckets import Contents, Filling, Item, checksum, padded
from rlx.core.engine.transfer.channels import Channel, Gloo, SharedMemory
from rlx.core.engine.transfer.errors import TransferError
from rlx.core.engine.transfer.place import FILE_PREFIX, Place, here, shared_memory_root
from rlx.core.engine.transfer.store import Store


class WeightsSource(Protocol):
    """Whole tensors under checkpoint names; each iteration begins anew."""

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        """What an iteration yields, without gathering it."""
        ...

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors; a tensor is valid until the next one is asked for."""
        ...


class Sender:
    """Sends weights to a fixed number of receivers, as often as wanted.

    Args:
        transport: `shared_memory`, `gloo`, or `auto`: shared memory when all receivers see it.
        receivers: how many there will be at a time.
        bucket: bytes; a larger tensor makes a larger one.
    """

    def __init__(self, *, transport: str, receivers: int, bucket: int) -> None:
        self.transport = transport
        self._receivers = receivers
        self._bucket = bucket
        self._place = here()
        self._store = Store.serve()
        self._channel: Channel | None = None
        self._places: dict[str, int] | None = None
        self._publication = -1
        self._told = 0
        """Buckets of this publication that the receivers know of."""
        self._items: dict[str, Item] = {}
        """All tensors as they were sent last."""
        self._aborted = threading.Event()
        self._link = WeightsLink(
            key=uuid.uuid4().hex,
            transport=transport,
            address=self._place.address,
            port=self._store.port,
        )

    def offer(self, version: int, base: int | None) -> WeightsUpdate:
        """Begin a publication; the first one holds all weights, whatever the engines have."""
        self._publication += 1
        return WeightsUpdate(
            link=self._link,
            number=self._publication,
            version=version,
            base=base if self._publication else None,
        )

    def send(self, source: WeightsSource, version: int) -> SentWeights:
        """Send all of `source` as the publication that was offered last.

        Raises:
            TransferError: a receiver is gone, or `abort` was called. Receivers that are alive hear
                of it; the sender can't be used any more.
        """
        number = self._publication
        try:
            if self._channel is None:
                self._open(source.metadata())
            self._store.wait_for(f"ready/{number}", self._receivers, self._stop)
            told, self._told = self._told, 0
            self._store.set(f"start/{number}")
            sent = self._send_buckets(source)
            whole = Contents(items=list(self._items.values()), last=True)
            self._store.set(f"whole/{number}", whole.encoded())
        except BaseException as error:
            with contextlib.suppress(TransferError):
                self._store.set("failed", str(error) or type(error).__name__)
            self.close()
            raise
        self._forget(number - 1, told)
        return SentWeights(
            version=version, bytes=sum(_size(item) for item in sent), checksum=checksum(sent)
        )

    def abort(self) -> None:
        """Have a running `send` give up; called from another thread."""
        self._aborted.set()

    def close(self) -> None:
        """Let go of shared memory and connections."""
        if self._channel is not None:
            self._channel.close()

    def _stop(self) -> None:
        if self._aborted.is_set():
            raise TransferError("the publication was given up")

    def _send_buckets(self, source: Iterable[tuple[str, torch.Tensor]]) -> list[Item]:
        sent: list[Item] = []
        bucket = self._empty()
        for name, tensor in source:
            if self._places is not None and name not in self._places:
                raise TransferError(f"{name} was not among the weights at first")
            if not bucket.takes(tensor):
                self._deliver(bucket, last=False)
                sent += bucket.items
                bucket = self._empty()
            bucket.add(name, tensor)
        self._deliver(bucket, last=True)
        sent += bucket.items
        self._items.update({item.name: item for item in sent})
        return sent

    def _empty(self) -> Filling:
        assert self._channel is not None
        self._stop()
        space = self._channel.space(self._told)
        return Filling(space=space, limit=self._bucket, places=self._places)

    def _deliver(self, bucket: Filling, *, last: bool) -> None:
        assert self._channel is not None
        self._channel.send(self._told, bucket.end)
        key = f"bucket/{self._publication}/{self._told}"
        self._store.set(key, bucket.contents(last=last).encoded())
        self._told += 1

    def _forget(self, number: int, buckets: int) -> None:
        """Keep the store small: nobody asks for the publication before this one any more."""
        if number >= 0:
            keys = [f"{word}/{number}" for word in ("ready", "start", "whole")]
            self._store.delete([*keys, *(f"bucket/{number}/{n}" for n in range(buckets))])

    def _open(self, metadata: Iterable[tuple[str, torch.dtype, torch.Size]]) -> None:
        """Wait for the receivers and open the channel."""
        sizes = {name: padded(shape.numel() * dtype.itemsize) for name, dtype, shape in metadata}
        total = sum(sizes.values())
        self._store.wait_for("placed", self._receivers, self._stop)
        joined = [f"place/{n}" for n in range(1, 1 + self._store.add("joined", 0))]
        keys = [key for key in joined if self._store.there([key])]
        places = [Place(**json.loads(self._store.get(key))) for key in keys]
        if self._shares_memory(places):
            remove_stale(shared_memory_root())
            path = shared_memory_root() / f"{FILE_PREFIX}{os.getpid()}-{self._link.key}"
            self._channel = SharedMemory(path, max(total, 1), create=True)
            starts = itertools.accumulate(sizes.values(), initial=0)
            self._places = dict(zip(sizes, starts, strict=False))
            self._announce("shared_memory", size=max(total, 1), path=str(path))
            return
        # Small models need no more than all of their bytes.
        capacity = max([*sizes.values(), min(self._bucket, total), 1])
        self._announce("gloo", size=capacity, path="")
        self._channel = Gloo(
            self._store,
            rank=0,
            world=1 + self._receivers,
            capacity=capacity,
            address=self._place.address,
            stop=self._stop,
        )

    def _announce(self, channel: str, *, size: int, path: str) -> None:
        plan = {
            "channel": channel,
            "path": path,
            "memory": self._place.memory,
            "size": size,
            "receivers": self._receivers,
        }
        self._store.set("plan", json.dumps(plan))

    def _shares_memory(self, places: Iterable[Place]) -> bool:
        if self.transport == "gloo":
            return False
        apart = [place.address for place in places if place.memory != self._place.memory]
        if apart and self.transport == "shared_memory":
            raise TransferError(
                f"the engines at {', '.join(apart)} do not see the shared memory of the learner at "
                f"{self._place.address}; use publication.transport: gloo"
            )
        return not apart


def place_message(place: Place) -> str:
    return json.dumps(asdict(place))


def _size(item: Item) -> int:
    dtype: torch.dtype = getattr(torch, item.dtype)
    return torch.Size(item.shape).numel() * dtype.itemsize


def remove_stale(root: Path) -> None:
    """Remove what killed runs left in shared memory (their process is gone)."""
    for path in root.glob(f"{FILE_PREFIX}*-*"):
        owner = path.name.removeprefix(FILE_PREFIX).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            with contextlib.suppress(OSError):  # it may be another user's
                path.unlink()
