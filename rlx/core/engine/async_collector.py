"""Generation that runs ahead of training, by admission control.

A group may start while

    accepted + running < (max_staleness + version + 1) · groups per step

with `version` the engine's policy version and `accepted` counted over the whole run. A group that
starts under version v is due at version v + max_staleness, and the oldest are taken first. A step
takes young groups before old ones that still run only as far as the old ones then still fit into
the steps before they are due: so no rollout is older than the bound, and none is ever thrown away.

The collector
  consumes:      tasks from the sampler; policy versions by `advance`
  waits for:     as many accepted groups as a step needs, among them those that can't wait
  unblocked by:  a group that finishes, is dropped or fails
  produces:      accepted groups, the oldest versions first
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.core.config import RolloutConfig
from rlx.core.engine.collector import Collected, GroupMaker, GroupScorer
from rlx.core.engine.engines import RolloutEngines
from rlx.core.engine.group_queue import GroupQueue, Started
from rlx.core.rollouts import Group
from rlx.core.samplers import BoundSampler, oversample_error


class AsyncCollector:
    """Keeps groups in flight while the learner trains.

    Args:
        settings: how many groups a step takes, how far they may run ahead, how many at once.
    """

    def __init__(
        self,
        *,
        maker: GroupMaker,
        scorer: GroupScorer,
        sampler: BoundSampler,
        client: RolloutEngines,
        settings: RolloutConfig,
    ) -> None:
        self._maker = maker
        self._scorer = scorer
        self._sampler = sampler
        self._client = client
        self._wanted = settings.groups
        self._max_staleness = settings.max_staleness
        self._max_running = settings.max_in_flight or sys.maxsize
        self._queue = GroupQueue(sampler)
        self._version = 0
        self._collected = 0
        """Groups handed to the trainer so far."""
        self._running: dict[asyncio.Task[None], Started] = {}
        self._ready: list[tuple[Started, Group]] = []
        self._restored = False
        """Whether groups of a checkpoint wait that this run's numbers are to be applied to."""
        self._tried = 0
        """Groups judged since the last step was full."""
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    async def collect(self, wanted: int) -> Collected:
        """Return `wanted` accepted groups, oldest version first.

        Raises:
            ComponentError: an agent or a reward failed under the policy `raise`.
            EngineError: the engine failed.
            UsageError: the sampler dropped so many groups that the over-sampling cap is hit.
        """
        started = time.perf_counter()
        while not self._is_full(wanted):
            self._fill()
            self._changed.clear()
            await self._changed.wait()
        self._ready.sort(key=lambda pair: (pair[0].version, pair[0].number))
        groups = [group for _, group in self._ready[:wanted]]
        del self._ready[:wanted]
        self._collected += wanted
        self._tried = 0
        self._fill()
        return Collected(
            groups=groups,
            metrics={
                "rollout/engine_idle": self._client.take_idle_share(),
                **self._sampler.metrics(),
                **self._scorer.take_metrics(),
                **self._maker.take_metrics(),
                **staleness_metrics(groups, self._version),
                "rollout/ready": float(len(self._ready)),
                "rollout/running": float(len(self._running)),
            },
            rollout_seconds=time.perf_counter() - started,
            reward_seconds=None,
        )

    def advance(self, version: int) -> None:
        """The engine has new weights: more groups may start."""
        self._version = version
        if self._restored:
            self._restored = False
            self._collected = version * self._wanted
            self._begin_late_ones_again()
        self._fill()

    def _begin_late_ones_again(self) -> None:
        """Of the groups that a checkpoint kept, begin those again that could not be trained on in
        time: the run may have been resumed with smaller steps or a tighter bound."""
        waiting = sorted(self._ready, key=lambda pair: (pair[0].version, pair[0].number))
        self._ready = []
        late: list[tuple[Started, Group]] = []
        for pair in waiting:
            trained_at = self._version + len(self._ready) // self._wanted
            in_time = trained_at - pair[0].version <= self._max_staleness
            (self._ready if in_time else late).append(pair)
        self._queue.put_back([(one.number, one.task) for one, _ in late])

    async def restart(self, step: int) -> None:
        """Give up what is under way and what waits: it was sampled by weights that are no more."""
        self._failure = None
        await self.close()
        self._ready.clear()
        self._queue.clear()
        self._tried = 0
        self._version = step
        self._collected = step * self._wanted

    async def close(self) -> None:
        """Give up what is under way."""
        jobs = list(self._running)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for job in jobs:  # those that were cancelled before their first step
            if (one := self._running.pop(job, None)) is not None:
                self._queue.put_back([(one.number, one.task)])

    def _is_full(self, wanted: int) -> bool:
        """Whether a step can be filled; raises what went wrong in a group meanwhile."""
        if self._failure is not None:
            raise self._failure
        if len(self._ready) < wanted:
            if self._tried > self._sampler.max_oversample * wanted:
                raise oversample_error(
                    self._sampler,
                    wanted=wanted,
                    dispatched=self._tried,
                    accepted=len(self._ready),
                )
            return False
        return all(self._can_wait(due, wanted) for due in range(self._max_staleness + 1))

    def _can_wait(self, due: int, wanted: int) -> bool:
        """Whether what is due `due` steps from now, or sooner, fits into the steps after this one
        once this one takes the oldest that are ready."""
        latest = self._version - self._max_staleness + due
        ready = sum(one.version <= latest for one, _ in self._ready)
        running = sum(one.version <= latest for one in self._running.values())
        return ready + running - min(ready, wanted) <= due * wanted

    def _fill(self) -> None:
        """Start as many groups as the bound allows."""
        outstanding = self._collected + len(self._ready) + len(self._running)
        bound = (self._max_staleness + self._version + 1) * self._wanted
        room = min(self._max_running - len(self._running), bound - outstanding)
        if room <= 0 or self._failure is not None:
            return
        for number, task in self._queue.take(room):
            one = Started(number, task, self._version)
            job = asyncio.get_running_loop().create_task(self._make(one))
            self._running[job] = one

    async def _make(self, one: Started) -> None:
        judged = False
        try:
            group = await self._maker.make(one.task, one.number)
            self._tried += 1
            is_kept = group is not None and self._sampler.keep(group) is None
            judged = True
            if group is not None:
                if is_kept:
                    self._ready.append((one, group))
                self._sampler.update([group])
        except Exception as error:
            self._failure = self._failure or error
        except BaseExceptionGroup:  # a signal has ended an agent that blocked, and ends the run
            return
        finally:
            job = asyncio.current_task()
            assert job is not None
            del self._running[job]
            if not judged:  # the state that is saved now has it among those to begin again
                self._queue.put_back([(one.number, one.task)])
            self._changed.set()
        if self._failure is None:
            self._refill()

    def _refill(self) -> None:
        try:
            self._fill()
        except Exception as error:  # of the sampler: `collect` tells
            self._failure = error
            self._changed.set()

    async def state_dict(self) -> dict[str, Any]:
        return {
            **self._queue.state_dict(self._ready, list(self._running.values())),
            "sampler": self._sampler.state_dict(),
            "agent": self._maker.agent.state_dict(),
            "rewards": await self._scorer.state_dict(),
        }

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._ready = self._queue.load_state_dict(state)
        self._restored = True
        self._sampler.load_state_dict(state["sampler"])
        if state.get("agent"):
            self._maker.agent.load_state_dict(state["agent"])
        await self._scorer.load_state_dict(state.get("rewards", {}))


def staleness_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Policy versions between an action token and the update: mean over tokens, and the most."""
    tokens: Counter[int] = Counter()
    for group in groups:
        for rollout in group.rollouts:
            for span in rollout.spans:
                for sampled_by, count in span.stretches:
                    tokens[version - sampled_by] += count
    total = tokens.total()
    if not total:
        return {}
    mean = sum(age * count for age, count in tokens.items()) / total
    return {"staleness/mean": mean, "staleness/max": float(max(tokens))}
