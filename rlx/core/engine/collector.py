"""From tasks to the groups of one batch: episodes, rewards, the sampler's filter, refill."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from rlx.core.agents import Episode, Generate, Limits, run_agent
from rlx.core.component import Bound
from rlx.core.engine.engines import Generator
from rlx.core.engine.garbage import seldom_collected
from rlx.core.engine.group_queue import Begun, GroupQueue
from rlx.core.engine.interfaces import Sampling
from rlx.core.rollouts import Group, Rollout, Task
from rlx.core.samplers import BoundSampler, oversample_error


class GroupScorer(Protocol):
    """Rewards for the rollouts of one group; None when the failure policy drops the group."""

    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Rollout] | None: ...

    def take_metrics(self) -> Mapping[str, float]: ...

    async def state_dict(self) -> Mapping[str, Any]: ...

    async def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The groups of one batch and what it took to get them."""

    groups: Sequence[Group]
    metrics: Mapping[str, float]
    rollout_seconds: float
    """That the trainer waited for rollouts."""
    reward_seconds: float | None
    """That it then waited for rewards; None where both go on at the same time."""


class Collection(Protocol):
    """Where the trainer gets its groups from: episodes, in turns with training (`Collector`) or
    ahead of it (`AsyncCollector`), or a recording (`Replay`)."""

    async def collect(self, wanted: int) -> Collected:
        """As many accepted groups as one step trains on."""
        ...

    def advance(self, version: int) -> None:
        """The engine has the weights of another policy version."""
        ...

    async def restart(self, step: int) -> None:
        """Give up what is under way; go on with other tasks, as after `step` steps."""
        ...

    async def close(self) -> None:
        """Give up what is under way."""
        ...

    async def state_dict(self) -> dict[str, Any]: ...

    async def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass(slots=True)
class _Clock:
    """When the last generation and the last reward of a wave ended."""

    started: float = field(default_factory=time.perf_counter)
    generated: float = 0.0
    finished: float = 0.0


class GroupMaker:
    """Makes groups: the rollouts of one task by an agent, with their rewards."""

    def __init__(
        self,
        *,
        client: Generator,
        agent: Bound,
        scorer: GroupScorer,
        tokenizer: Any,
        sampling: Sampling,
        limits: Limits,
        group_size: int,
        seed: int | str,
        greedy: bool = False,
    ) -> None:
        """`greedy`: one more rollout per group, greedy, with its rewards but not in the group."""
        self._client = client
        self.agent = agent
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._limits = limits
        self._group_size = group_size
        self._seed = seed
        self._counts: Counter[str] = Counter()
        self._greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0) if greedy else None

    async def make(self, task: Task, number: int, clock: _Clock | None = None) -> Group | None:
        """Group `number`; None when agent or reward failed and the policy is to drop the group."""
        count = self._group_size
        ways = [self._sampling] * count + ([self._greedy] if self._greedy else [])
        with self._client.group(len(ways)) as generate:
            rollouts = await self._play(
                self._episode(task, number, index, way, generate) for index, way in enumerate(ways)
            )
        if clock is not None:
            clock.generated = time.perf_counter()
        if rollouts is None:
            return None
        # The greedy one on its own, so that a reward of the whole group does not see it.
        parts = [part for part in (rollouts[:count], rollouts[count:]) if part]
        scored = await asyncio.gather(*(self._scorer.score_group(part) for part in parts))
        if clock is not None:
            clock.finished = time.perf_counter()
        if scored[0] is None or scored[-1] is None:
            return None
        greedy = scored[1][0] if len(parts) > 1 and scored[1] else None
        return Group(id=number, task=task, rollouts=scored[0], greedy=greedy)

    async def _play(self, begun: Iterable[Episode]) -> list[Rollout] | None:
        """Run the agent on each; None when it failed and the policy is to drop the group."""
        episodes = list(begun)  # held here only: rewards may take long
        policy = self._limits.failure
        on_error: Literal["raise", "keep"] = "raise" if policy == "raise" else "keep"
        async with asyncio.TaskGroup() as running:
            jobs = [
                running.create_task(run_agent(self.agent, one, on_error=on_error))
                for one in episodes
            ]
        rollouts = [job.result() for job in jobs]
        failed = sum(rollout.error is not None for rollout in rollouts)
        self._counts["agent/failed"] += failed
        self._counts["agent/observations_cut"] += sum(one.observations_cut for one in episodes)
        if failed and policy == "drop_group":
            self._counts["agent/dropped_groups"] += 1
            return None
        return rollouts

    def take_metrics(self) -> dict[str, float]:
        """Return what was counted since the last call, and is not 0."""
        metrics = {name: float(count) for name, count in self._counts.items() if count}
        self._counts.clear()
        return metrics

    def _episode(
        self, task: Task, number: int, index: int, sampling: Sampling, generate: Generate
    ) -> Episode:
        return Episode(
            task=task,
            group_id=number,
            index=index,
            seed=rollout_seed(self._seed, number, index),
            generate=generate,
            tokenizer=self._tokenizer,
            sampling=sampling,
            limits=self._limits,
        )


class Collector:
    """Runs episodes until a batch of accepted groups is full.

    Waves are synchronous: each asks for exactly the groups that are missing, so that the run of
    tasks, seeds and engine batches is a function of the configuration alone.
    """

    def __init__(
        self,
        *,
        maker: GroupMaker,
        scorer: GroupScorer,
        sampler: BoundSampler,
    ) -> None:
        self._maker = maker
        self._scorer = scorer
        self._sampler = sampler
        self._queue = GroupQueue(sampler)

    async def collect(self, wanted: int) -> Collected:
        """Return `wanted` accepted groups, in the order of their tasks.

        Raises:
            ComponentError: when the sampler drops so many groups that the over-sampling cap is hit,
                or a reward failed under the policy `raise`.
        """
        accepted: list[Group] = []
        dispatched = 0
        clock = _Clock()
        while len(accepted) < wanted:
            missing = wanted - len(accepted)
            if dispatched + missing > self._sampler.max_oversample * wanted:
                raise oversample_error(
                    self._sampler, wanted=wanted, dispatched=dispatched, accepted=len(accepted)
                )
            begun = self._queue.take(missing)
            dispatched += len(begun)
            with seldom_collected():
                accepted += await self._wave(begun, clock)
        return Collected(
            groups=accepted,
            metrics={
                **self._sampler.metrics(),
                **self._scorer.take_metrics(),
                **self._maker.take_metrics(),
            },
            rollout_seconds=clock.generated - clock.started,
            reward_seconds=max(clock.finished - clock.generated, 0.0),
        )

    def advance(self, version: int) -> None:
        """Nothing to do: no group starts before it is asked for."""

    async def restart(self, step: int) -> None:
        """Nothing to do: the next groups are other ones anyway."""

    async def close(self) -> None:
        """Nothing to do: no group outlives `collect`."""

    async def _wave(self, begun: Sequence[Begun], clock: _Clock) -> list[Group]:
        async with asyncio.TaskGroup() as running:
            jobs = [
                running.create_task(self._maker.make(task, number, clock)) for number, task in begun
            ]
        groups = [group for job in jobs if (group := job.result()) is not None]
        kept = [group for group in groups if self._sampler.keep(group) is None]
        self._sampler.update(groups)
        return kept

    async def state_dict(self) -> dict[str, Any]:
        return {
            **self._queue.state_dict(),
            "sampler": self._sampler.state_dict(),
            "agent": self._maker.agent.state_dict(),
            "rewards": await self._scorer.state_dict(),
        }

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        waiting = self._queue.load_state_dict(state)
        # Sampled by earlier weights, in a run that was ahead of its training.
        self._queue.put_back([(one.number, one.task) for one, _ in waiting])
        self._sampler.load_state_dict(state["sampler"])
        if state.get("agent"):
            self._maker.agent.load_state_dict(state["agent"])
        await self._scorer.load_state_dict(state.get("rewards", {}))


def rollout_seed(seed: int | str, group: int, index: int) -> int:
    """A 31-bit seed for one rollout, a function of the run's seed and the rollout's place."""
    digest = hashlib.blake2b(f"{seed}/{group}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


def unwrap(error: BaseException) -> BaseException:
    """The first real error inside the exception groups that `asyncio.TaskGroup` raises."""
    while isinstance(error, BaseExceptionGroup):
        error = next(
            (item for item in error.exceptions if not isinstance(item, asyncio.CancelledError)),
            error.exceptions[0],
        )
    return error
