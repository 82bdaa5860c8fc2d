"""The worker that runs rewards: in a Ray actor or in the driver's process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.core.engine.interfaces import RewardReply
from rlx.core.engine.reward_calls import RewardCall
from rlx.core.errors import EngineError
from rlx.core.references import ComponentRef
from rlx.core.rewards import RewardInputs
from rlx.core.threads import DaemonThreads

_STUCK_LIMIT = 64
"""Hanging threads that a worker endures when nobody replaces it."""


class RewardWorker:
    """Runs all rewards of a run, `concurrency` calls at once.

    Synchronous functions run in threads, asynchronous ones on the event loop. An instance of a
    class component is shared by the calls: one with state has to be thread-safe.

    Args:
        rewards: components with their weights (the weights are the driver's business).
        timeout: seconds for one call, from the moment it starts to run.
        retries: further attempts after a call raised.
        backoff: seconds before the first of them; doubles with each.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[ComponentRef, float]],
        concurrency: int,
        timeout: float,
        retries: int = 0,
        backoff: float = 0.5,
    ) -> None:
        self._refs = [ref for ref, _ in rewards]
        self._concurrency = concurrency
        self._timeout = timeout
        self._retries = retries
        self._backoff = backoff
        self._threads = DaemonThreads("rlx-reward")
        self._calls: list[RewardCall] = []
        self._slots: _Slots | None = None

    def start(self) -> Mapping[str, Any]:
        """Import the components; raises what goes wrong there."""
        self._calls = [
            RewardCall(
                ref.resolve(),
                threads=self._threads,
                timeout=self._timeout,
                retries=self._retries,
                backoff=self._backoff,
            )
            for ref in self._refs
        ]
        return {"rewards": [ref.name for ref in self._refs]}

    async def score(self, samples: list[RewardInputs]) -> list[list[RewardReply]]:
        """Return for each sample one reply per reward, in the order of both.

        Groups must be complete: a function of a group's scope is given what has the same
        `group_id`, one of the batch's scope all samples of this call (however many those are).
        A component that fails gives replies with `error`.

        Raises:
            EngineError: so many calls hang that this worker can't go on.
        """
        if self._threads.stuck >= max(_STUCK_LIMIT, self._concurrency):
            raise EngineError(
                f"{self._threads.stuck} calls of rewards hang in one process "
                f"({', '.join(ref.name for ref in self._refs)}); each keeps a thread that Python "
                "can't end. Give the reward a time-out of its own, or run several reward "
                "workers under Ray, where a worker that hangs is replaced."
            )
        table: list[list[RewardReply | None]] = [[None] * len(self._calls) for _ in samples]
        slots = self._own_slots()

        async def one(column: int, call: RewardCall, rows: list[int]) -> None:
            async with slots.turn[column], slots.any:
                replies = await call.reply([samples[row] for row in rows])
            for row, reply in zip(rows, replies, strict=True):
                table[row][column] = reply

        async with asyncio.TaskGroup() as running:
            for column, call in enumerate(self._calls):
                for rows in call.split(samples):
                    running.create_task(one(column, call, rows))
        return [[reply for reply in row if reply is not None] for row in table]

    @property
    def serial(self) -> bool:
        """Whether some reward's calls run one at a time."""
        return any(_one_at_a_time(call) for call in self._calls)

    def stuck(self) -> int:
        """Calls that were given up and still run; at `concurrency` replace the worker."""
        return self._threads.stuck

    def state_dict(self) -> dict[str, Any]:
        """State of the components that have any, by position."""
        states = {str(i): call.bound.state_dict() for i, call in enumerate(self._calls)}
        return {position: state for position, state in states.items() if state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for position, item in state.items():
            self._calls[int(position)].bound.load_state_dict(item)

    def stop(self) -> None:
        self._threads.close()

    def _own_slots(self) -> _Slots:
        loop = asyncio.get_running_loop()
        if self._slots is None or self._slots.loop is not loop:  # inline: a loop per asyncio.run
            self._slots = _Slots(
                loop=loop,
                any=asyncio.Semaphore(self._concurrency),
                turn=[
                    asyncio.Semaphore(1 if _one_at_a_time(call) else self._concurrency)
                    for call in self._calls
                ],
            )
        return self._slots


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slots:
    """What a call needs before its time starts to run."""

    loop: asyncio.AbstractEventLoop
    any: asyncio.Semaphore
    """Of all rewards together."""
    turn: list[asyncio.Semaphore]
    """Of each reward."""


def _one_at_a_time(call: RewardCall) -> bool:
    """A model takes all cores (or the GPU) for one call; a second one would only make both late."""
    return "reward_model" in call.bound.requires
