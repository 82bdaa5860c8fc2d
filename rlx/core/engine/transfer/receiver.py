"""An engine worker's end: buckets in, checked tensors out."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from rlx.core.engine.interfaces import WeightsLink
from rlx.core.engine.transfer.buckets import Contents, Item, checksum, opened
from rlx.core.engine.transfer.channels import Channel, Gloo, SharedMemory
from rlx.core.engine.transfer.errors import LearnerLostError, TransferError
from rlx.core.engine.transfer.place import here
from rlx.core.engine.transfer.sender import place_message
from rlx.core.engine.transfer.store import Store

_TOO_LATE = "gloo sends once, and an engine that is started anew comes too late"


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What came."""

    checksum: str
    """Empty where the transport computes none."""
    waited: float
    """Seconds until all receivers were ready."""


class Receiver:
    """Receives what one sender sends to this process.

    Raises:
        LearnerLostError: from here and from `buckets`: the sender is gone or gave up.
        TransferError: from `buckets`: what came is not what was sent.
    """

    def __init__(self, link: WeightsLink) -> None:
        self.link = link
        self._store = Store.connect(link.address, link.port)
        self._rank = self._store.add("joined", 1)
        self._place = here()
        self._store.set(f"place/{self._rank}", place_message(self._place))
        self._store.add("placed", 1)
        self._channel: Channel | None = None
        self._items: Sequence[Item] = ()
        self._left = False
        self._waited = 0.0

    def buckets(self, publication: int, *, complete: bool) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the tensors of a publication, bucket by bucket.

        They are views of memory that may be written again: valid until the next bucket is asked
        for. While the caller works on one bucket, the next one is fetched and checked.

        Args:
            complete: all weights are needed. Where the publication is over, or holds only some of
                them, they come from where the sender keeps them.
        """
        self._items, self._left = (), False
        if self._channel is None:
            self._channel = self._open()
        self._store.add(f"ready/{publication}", 1)
        started = time.perf_counter()
        self._store.wait([f"start/{publication}"], self._stop)
        self._waited = time.perf_counter() - started
        yield from self._follow(publication)
        if complete:
            yield from self._others(publication)

    def _follow(self, publication: int) -> Iterator[dict[str, torch.Tensor]]:
        thread = ThreadPoolExecutor(1, thread_name_prefix="weights")
        fetched = thread.submit(self._fetch, publication, 0)
        finished = False
        try:
            for number in itertools.count():
                contents, tensors = fetched.result()
                if not contents.last:
                    fetched = thread.submit(self._fetch, publication, number + 1)
                self._items = [*self._items, *contents.items]
                yield tensors
                if contents.last:
                    finished = True
                    return
        finally:
            # The caller may have failed, and then nobody needs what is still being fetched.
            self._left = not finished
            thread.shutdown(wait=False)

    def _others(self, publication: int) -> Iterator[dict[str, torch.Tensor]]:
        """What the publication left out, for an engine that has not the rest."""
        assert self._channel is not None
        key = f"whole/{publication}"
        self._store.wait([key], self._stop)
        whole = Contents.decoded(self._store.get(key))
        came = {item.name for item in self._items}
        others = [item for item in whole.items if item.name not in came]
        if others and not self._channel.stays:
            raise LearnerLostError(_TOO_LATE)
        if others:
            contents = Contents(items=others)
            yield opened(self._channel.space(0), contents)

    @property
    def stays(self) -> bool:
        """Whether what came stays where it is until the next publication."""
        return self._channel is not None and self._channel.stays

    @property
    def received(self) -> Received:
        """About the last publication."""
        return Received(checksum=checksum(self._items), waited=self._waited)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def _fetch(self, publication: int, number: int) -> tuple[Contents, dict[str, torch.Tensor]]:
        assert self._channel is not None
        key = f"bucket/{publication}/{number}"
        self._store.wait([key], self._stop)
        contents = Contents.decoded(self._store.get(key))
        self._channel.receive(number, contents.length)
        return contents, opened(self._channel.space(number), contents)

    def _stop(self) -> None:
        if self._left:
            raise TransferError("the engine gave up")
        if self._store.there(["failed"]):
            raise LearnerLostError(f"the learner gave up: {self._store.get('failed').decode()}")

    def _open(self) -> Channel:
        self._store.wait(["plan"], self._stop)
        plan = json.loads(self._store.get("plan"))
        if plan["channel"] == "shared_memory":
            if plan["memory"] != self._place.memory:
                raise LearnerLostError(f"its shared memory is not that of {self._place.address}")
            return SharedMemory(Path(plan["path"]), plan["size"], create=False)
        if self._rank > plan["receivers"]:
            raise LearnerLostError(_TOO_LATE)
        return Gloo(
            self._store,
            rank=self._rank,
            world=1 + plan["receivers"],
            capacity=plan["size"],
            address=self._place.address,
            stop=self._stop,
        )
