"""All ranks of an offline learner as one: shares the rows out, joins the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.core.engine.interfaces import FileMarks, UpdateResult
from rlx.core.engine.runtime import Worker
from rlx.core.engine.shares import balanced_shares
from rlx.core.engine.together import together
from rlx.core.offline.rows import RowBatch


class ObjectiveGroup:
    """The data-parallel ranks of one model; for `score` alone, also a scorer's replicas."""

    def __init__(self, workers: Sequence[Worker]) -> None:
        self._workers = list(workers)

    @property
    def ranks(self) -> int:
        return len(self._workers)

    async def score(self, batch: RowBatch) -> np.ndarray:
        """Log-probs (or a head's numbers) [N] under the current weights."""
        shares = self._shares(batch)
        parts = await self._each("score", [(batch.take(share),) for share in shares])
        joined = np.zeros(batch.action_count, np.float32)
        for share, part in zip(shares, parts, strict=True):
            joined[batch.action_indices(share)] = part
        return joined

    async def update(
        self, batch: RowBatch, *, step: int, others: RowBatch | None
    ) -> UpdateResult | None:
        """One optimizer step on all rows; None when aborted in time.

        Args:
            others: row for row the prompt with another row's completion, if there are any.
        """
        calls, options = self._calls(batch, others)
        results = await self._each("update", calls, options, step=step)
        return None if any(result is None for result in results) else results[0]

    async def measure(
        self, batch: RowBatch, *, step: int, prefix: str, others: RowBatch | None
    ) -> dict[str, float]:
        """Loss and metrics of the rows, without training on them."""
        calls, options = self._calls(batch, others)
        return (await self._each("measure", calls, options, step=step, prefix=prefix))[0]

    async def abort(self) -> None:
        await asyncio.gather(*(worker.now("abort") for worker in self._workers))

    async def hold(self, *, copy: bool, export: bool, facts: Mapping[str, float]) -> None:
        """All ranks take hold of their state in memory."""
        await self._all("hold", copy=copy, export=export, facts=facts)

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        """All ranks write what they hold, into the folders `state` and `model`."""
        parts = await self._all("write_held", state, model)
        return {name: mark for part in parts for name, mark in part.items()}

    async def load(self, folder: str) -> None:
        await self._all("load", folder)

    async def export(
        self, folder: str, facts: Mapping[str, float], *, adapter: bool = False
    ) -> None:
        await self._all("export", folder, facts, adapter=adapter)

    def _shares(self, batch: RowBatch) -> list[np.ndarray]:
        return balanced_shares(batch.row_lengths, len(self._workers))

    def _calls(
        self, batch: RowBatch, others: RowBatch | None
    ) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]]]:
        shares = self._shares(batch)
        calls = [(batch.take(share),) for share in shares]
        return calls, [
            {"others": None if others is None else others.take(share)} for share in shares
        ]

    async def _each(
        self,
        method: str,
        calls: Sequence[tuple[Any, ...]],
        options: Sequence[dict[str, Any]] | None = None,
        **common: Any,
    ) -> list[Any]:
        """Call every rank with arguments of its own."""
        own = options or [{} for _ in calls]
        return await together(
            worker.call(method, *arguments, **mine, **common)
            for worker, arguments, mine in zip(self._workers, calls, own, strict=True)
        )

    async def _all(self, method: str, *args: Any, **options: Any) -> list[Any]:
        return await together(worker.call(method, *args, **options) for worker in self._workers)
