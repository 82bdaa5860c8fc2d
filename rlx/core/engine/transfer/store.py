"""Short messages between the sender of weights and its receivers, through a store at the sender.

Keys of one link; n counts receivers from 1, p publications and b the buckets of one from 0:

    joined         how many receivers have come; each takes its number n from it
    place/n        where receiver n is
    placed         how many have said so; one that has come may have died before
    plan           how the buckets travel
    ready/p        how many wait for publication p
    start/p        all are ready
    bucket/p/b     what is in the bucket, which is there now
    whole/p        publication p is complete: where all weights lie, if they stay
    failed         why the sender gave up
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from rlx.core.engine.transfer.errors import LearnerLostError

CONNECT_PATIENCE = timedelta(seconds=60)
_SHORTEST, _LONGEST = 1e-4, 5e-3
"""Seconds between two looks."""


class Store:
    """One end's connection. Its methods raise `LearnerLostError` when the other end is gone."""

    def __init__(self, store: Any) -> None:
        self._store = store

    @staticmethod
    def serve() -> Store:
        """The sender's end, on a free port."""
        return Store(_tcp_store("127.0.0.1", 0, serve=True))

    @staticmethod
    def connect(address: str, port: int) -> Store:
        try:
            return Store(_tcp_store(address, port, serve=False))
        except dist.DistError as error:
            raise LearnerLostError(f"no learner answers at {address}:{port}: {error}") from error

    @property
    def port(self) -> int:
        return int(self._store.port)

    def set(self, key: str, value: str = "") -> None:
        self._try(lambda: self._store.set(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0, and return the sum."""
        return int(self._try(lambda: self._store.add(key, amount)))

    def get(self, key: str) -> bytes:
        """The value of a key, once it is there."""
        self.wait([key])
        value: bytes = self._try(lambda: self._store.get(key))
        return value

    def wait(self, keys: Sequence[str], stop: Callable[[], None] = lambda: None) -> None:
        """Wait until all keys are there; `stop` may raise meanwhile.

        It looks again and again, because a wait of the store itself can't be ended from outside
        (and complains to stderr when its time is up).
        """
        pause = _SHORTEST
        while not self.there(keys):
            stop()
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST)

    def wait_for(self, key: str, number: int, stop: Callable[[], None]) -> None:
        """Wait until a number that others add to is as high; `stop` may raise meanwhile."""
        pause = _SHORTEST
        while self.add(key, 0) < number:
            stop()
            time.sleep(pause)
            pause = min(1.2 * pause, _LONGEST)

    def there(self, keys: Sequence[str]) -> bool:
        """Whether all of these keys have been set."""
        return bool(self._try(lambda: self._store.check(list(keys))))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._try(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def below(self, prefix: str) -> Any:
        """For process groups: torch's own store, with keys of its own."""
        return dist.PrefixStore(prefix, self._store)  # type: ignore[attr-defined]

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except dist.DistError as error:
            first = str(error).split("\n")[0]
            raise LearnerLostError(f"the other end of the transfer is gone: {first}") from error


def _tcp_store(address: str, port: int, *, serve: bool) -> Any:
    return dist.TCPStore(  # type: ignore[attr-defined]
        address, port, None, serve, CONNECT_PATIENCE, wait_for_workers=False
    )
