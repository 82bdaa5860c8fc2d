"""Rewards for many callers: requests become batches, and none is scored twice."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from rlx.core.config import RewardPolicy
from rlx.core.engine.interfaces import RewardReply
from rlx.core.engine.reward_compose import part_names
from rlx.core.engine.reward_worker import RewardWorker
from rlx.core.errors import RlxError
from rlx.core.references import ComponentRef
from rlx.core.rewards import RewardInputs

_KEPT = 4096
"""Answers that are kept for requests that come again."""


class ConflictError(RlxError):
    """Two requests with the same id that ask for different things."""


class OverloadedError(RlxError):
    """More samples wait than may."""


class RewardService:
    """Scores samples with the weighted sum of some rewards.

    Args:
        rewards: components with their weights.
        policy: its `timeout`, `retries` and `concurrency` count; what becomes of a failed reward
            is the caller's business, and so is clipping.
        batch: samples that are scored together, at most (one request may have more).
        wait: seconds for which a batch that isn't full waits for more.
        waiting: samples that may wait before further requests are turned away.
    """

    def __init__(
        self,
        rewards: Sequence[tuple[ComponentRef, float]],
        policy: RewardPolicy,
        *,
        batch: int = 64,
        wait: float = 0.005,
        waiting: int = 16_384,
    ) -> None:
        self._worker = RewardWorker(
            rewards,
            policy.concurrency,
            policy.timeout,
            policy.retries,
            policy.retry_backoff,
        )
        self.names = part_names([ref.name for ref, _ in rewards])
        self.weights = [weight for _, weight in rewards]
        self._batch, self._wait, self._most = batch, wait, waiting
        self._slots = asyncio.Semaphore(policy.concurrency)
        self._queue: asyncio.Queue[_Request] = asyncio.Queue()
        self._waiting = 0
        self._answers: OrderedDict[str, _Answer] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()
        self._group_ids = itertools.count()
        self._collector: asyncio.Task[None] | None = None
        self.counts = {"requests": 0, "repeated": 0, "samples": 0, "failed": 0, "batches": 0}

    def load(self) -> None:
        """Import the components and load what they hold; raises what goes wrong there."""
        self._worker.start()
        if self._worker.serial:
            self._slots = asyncio.Semaphore(1)  # while one batch runs, the next one fills

    async def score(
        self, samples: Sequence[RewardInputs], *, key: str | None = None, content: bytes = b""
    ) -> list[dict[str, Any]]:
        """Return one `{"score", "parts", "metrics"}` or `{"error"}` per sample.

        Args:
            key: names the request; a second one with the same key gets the first one's answer.
            content: by which requests with the same key are compared.

        Raises:
            ConflictError: another request had this key.
            OverloadedError: too many samples wait already.
        """
        self.counts["requests"] += 1
        known = self._answers.get(key) if key is not None else None
        if known is not None:
            if known.content != content:
                raise ConflictError(f"the id {key!r} was given to another request before")
            self.counts["repeated"] += 1
            return await asyncio.shield(known.task)
        if self._waiting + len(samples) > self._most and self._waiting:
            raise OverloadedError(f"{self._waiting} samples wait already")
        task = self._background(self._enqueue(samples))
        if key is not None:
            self._keep(key, _Answer(task, content))
        # A caller that hangs up doesn't stop the work: it will come again and find it done.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """Give up what still runs."""
        for task in [*self._running, *([self._collector] if self._collector else [])]:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task
        self._worker.stop()

    async def _enqueue(self, samples: Sequence[RewardInputs]) -> list[dict[str, Any]]:
        if not samples:
            return []
        if self._collector is None or self._collector.done():
            self._collector = asyncio.ensure_future(self._collect())
        loop = asyncio.get_running_loop()
        request = _Request(self._own_groups(samples), loop.create_future())
        self._waiting += len(samples)
        self._queue.put_nowait(request)
        return await request.reply

    def _own_groups(self, samples: Sequence[RewardInputs]) -> list[RewardInputs]:
        """Callers number their groups independently: give each group a number of its own."""
        numbers: dict[int, int] = {}
        for sample in samples:
            if sample.group_id not in numbers:
                numbers[sample.group_id] = next(self._group_ids)
        return [dataclasses.replace(one, group_id=numbers[one.group_id]) for one in samples]

    async def _collect(self) -> None:
        """Consumes requests; waits for the first, then for a full batch or the time that one may
        wait, then for a free slot; unblocked by requests; produces running batches."""
        loop = asyncio.get_running_loop()
        while True:
            requests = [await self._queue.get()]
            until = loop.time() + self._wait
            await self._slots.acquire()
            while sum(len(one.samples) for one in requests) < self._batch:
                try:
                    async with asyncio.timeout_at(until):
                        requests.append(await self._queue.get())
                except TimeoutError:
                    break
            self._background(self._run(requests))

    async def _run(self, requests: list[_Request]) -> None:
        samples = [sample for request in requests for sample in request.samples]
        self.counts["batches"] += 1
        try:
            rows = await self._worker.score(samples)
        except Exception as error:
            for request in requests:
                if not request.reply.done():
                    request.reply.set_exception(error)
            return
        finally:
            self._slots.release()
            self._waiting -= len(samples)
        answers = iter([self._answer(row) for row in rows])
        for request in requests:
            own = [next(answers) for _ in request.samples]
            if not request.reply.done():
                request.reply.set_result(own)

    def _answer(self, replies: Sequence[RewardReply]) -> dict[str, Any]:
        """One sample's answer: a single reward's own, or a sum with the rewards as its parts."""
        self.counts["samples"] += 1
        errors = [reply.error for reply in replies if reply.error is not None]
        if errors:
            self.counts["failed"] += 1
            return {"error": "\n".join(errors)}
        scores = {
            name: reply.score
            for name, reply in zip(self.names, replies, strict=True)
            if reply.score is not None
        }
        weights = dict(zip(self.names, self.weights, strict=True))
        total = sum(weights[name] * score for name, score in scores.items()) if scores else None
        if len(replies) == 1:
            (reply,) = replies
            numbers = {"parts": dict(reply.parts), "metrics": dict(reply.metrics)}
            return {"score": total, **numbers, **({"note": reply.note} if reply.note else {})}
        parts, metrics = dict(scores), dict[str, float]()
        for name, reply in zip(self.names, replies, strict=True):
            parts.update({f"{name}/{key}": value for key, value in reply.parts.items()})
            metrics.update({f"{name}/{key}": value for key, value in reply.metrics.items()})
        notes = zip(self.names, replies, strict=True)
        note = "\n".join(f"{name}: {reply.note}" for name, reply in notes if reply.note)
        numbers = {"parts": parts, "metrics": metrics}
        return {"score": total, **numbers, **({"note": note} if note else {})}

    def _keep(self, key: str, answer: _Answer) -> None:
        self._answers[key] = answer
        while len(self._answers) > _KEPT and next(iter(self._answers.values())).task.done():
            self._answers.popitem(last=False)

        def forget_failure(task: asyncio.Task[Any]) -> None:
            if task.cancelled() or task.exception() is not None:
                self._answers.pop(key, None)

        answer.task.add_done_callback(forget_failure)

    def _background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task


@dataclasses.dataclass(slots=True)
class _Request:
    samples: list[RewardInputs]
    reply: asyncio.Future[list[dict[str, Any]]]


@dataclasses.dataclass(slots=True, frozen=True)
class _Answer:
    task: asyncio.Task[list[dict[str, Any]]]
    content: bytes
