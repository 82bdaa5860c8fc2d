"""Several rollout engines as one: where a request goes, and what all of them are told.

A group's rollouts share their prompt and the turns of an episode share what came before, so a group
has a home: the engine that was the least loaded when the group began. Its requests go there, where
the prefix is in the cache, unless the home has become much fuller than another engine.

A request brings its own seed, so its tokens don't depend on which engine it went to.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from rlx.core.engine.client import RolloutClient
from rlx.core.engine.interfaces import Generation, PublishReport, Sampling, WeightsUpdate
from rlx.core.engine.rollout.stats import engine_metrics
from rlx.core.engine.trace import BusyClock, Trace
from rlx.core.turns import Generate

_MUCH_FULLER = 2
_SLACK = 16
"""A home with at most this many requests more than the emptiest engine is kept in any case."""


class Generator(Protocol):
    """What continues the prompts of groups."""

    def group(self, size: int) -> AbstractContextManager[Generate]:
        """Open a group of `size` rollouts and yield the `generate` of its episodes."""
        ...


class RolloutEngines:
    """All rollout engines of a run, behind the calls of one.

    Args:
        clients: at least one.
        sleep_level: what engines that share their GPUs give up in `sleep`; 0: nothing.
    """

    def __init__(self, clients: Sequence[RolloutClient], *, sleep_level: int = 0) -> None:
        self._members = [_Member(client) for client in clients]
        self._sleep_level = sleep_level

    def __len__(self) -> int:
        return len(self._members)

    @contextmanager
    def group(self, size: int) -> Iterator[Generate]:
        """Open a group of `size` rollouts and yield its `generate`.

        Its place on the engine is taken at once, so that groups that begin together are spread
        before the first of their requests comes.
        """
        home = min(self._members, key=_load)
        route = _Route(self._members, home, size)
        home.reserved += size
        try:
            yield route.generate
        finally:
            home.reserved -= route.reserved

    async def abort(self) -> None:
        """End every running request."""
        await asyncio.gather(*(member.client.abort() for member in self._members))

    async def load_weights(self, update: WeightsUpdate) -> list[PublishReport]:
        """Replace the weights of every engine; each takes them as soon as it can."""
        return await asyncio.gather(
            *(member.client.load_weights(update) for member in self._members)
        )

    async def sleep(self) -> None:
        """Leave the GPUs to others until the next weights come, where they are shared."""
        if self._sleep_level:
            await asyncio.gather(
                *(member.client.sleep(self._sleep_level) for member in self._members)
            )

    def take_idle_share(self) -> float:
        """Share of the time since the last call without a request, 0 … 1, mean over engines."""
        shares = [member.client.take_idle_share() for member in self._members]
        return sum(shares) / len(shares)

    def watch(self, trace: Trace) -> None:
        """Write to the trace when each engine has something to do."""
        for number, member in enumerate(self._members):
            member.client.watch(BusyClock(trace, f"engine {number}"))

    async def take_metrics(self) -> dict[str, float]:
        """`engine/*`: what the engines did since the last call."""
        calls = (member.client.take_stats() for member in self._members)
        return engine_metrics(await asyncio.gather(*calls))

    async def forget(self) -> None:
        """Have every engine drop its cached prefixes."""
        await asyncio.gather(*(member.client.forget() for member in self._members))

    async def stop(self) -> None:
        await asyncio.gather(*(member.client.stop() for member in self._members))


class _Member:
    """An engine and how many of the requests that groups will make of it are still to come."""

    __slots__ = ("client", "reserved")

    def __init__(self, client: RolloutClient) -> None:
        self.client = client
        self.reserved = 0


def _load(member: _Member) -> int:
    return member.client.load + member.reserved


class _Route:
    """Where the requests of one group go."""

    __slots__ = ("_home", "_members", "reserved")

    def __init__(self, members: Sequence[_Member], home: _Member, size: int) -> None:
        self._members = members
        self._home = home
        self.reserved = size

    async def generate(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Generation:
        """Sample one continuation; raises `EngineError` when the engine failed."""
        if self.reserved:
            self.reserved -= 1
            self._home.reserved -= 1
        return await self._member().client.generate(prompt, sampling, seed)

    def _member(self) -> _Member:
        emptiest = min(self._members, key=_load)
        if _load(self._home) > _MUCH_FULLER * _load(emptiest) + _SLACK:
            return emptiest
        return self._home
