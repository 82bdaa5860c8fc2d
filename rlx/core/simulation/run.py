"""The trainer's loop in virtual time: admission, generation, rewards, update, publication.

It follows the real loop (`rlx.core.engine.trainer`, `async_collector`, `engines`, `client`): how
many groups may run, which a step takes, where a group's requests go, what waits for new weights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from rlx.core.simulation.clock import Clock
from rlx.core.simulation.engine import Engine
from rlx.core.simulation.timings import Timings

_WARM = 2
"""Steps that are not counted: the pipeline fills."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The numbers that a simulation is asked about."""

    groups: int
    group_size: int
    engines: int
    ranks: int
    max_staleness: int = 0
    partial_rollout: bool = False
    max_in_flight: int | None = None
    max_running: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Means over the steps that are counted."""

    step: float
    """Seconds of one training step."""
    engine_idle: float
    """Share of the time in which an engine has no sequence, mean over engines."""
    learner_idle: float
    """Share of the time in which the learner waits for rollouts or weights to be taken."""
    staleness: float
    """Policy versions between a group's beginning and its update."""
    rollouts_per_second: float


@dataclass(slots=True)
class _Group:
    number: int
    version: int
    left: int
    tokens: float = 0.0


def simulate(timings: Timings, shape: Shape, *, steps: int = 12, seed: int = 0) -> Prediction:
    """Play `steps` counted training steps."""
    loop = _Loop(timings, shape, random.Random(seed), steps + _WARM)
    loop.start()
    loop.clock.run(lambda: len(loop.ends) >= loop.steps)
    return loop.prediction()


class _Loop:
    def __init__(self, timings: Timings, shape: Shape, chance: random.Random, steps: int) -> None:
        self.clock = Clock()
        self.steps = steps
        self.ends: list[float] = []
        self._timings = timings
        self._shape = shape
        self._chance = chance
        self._engines = [
            Engine(self.clock, timings, running=shape.max_running) for _ in range(shape.engines)
        ]
        doublings = max(shape.ranks.bit_length() - 1, 0)
        self._speed = shape.ranks * timings.rank_efficiency**doublings
        self._version = self._collected = self._started = 0
        self._running: dict[int, _Group] = {}
        self._ready: list[_Group] = []
        self._collecting = False
        self._trained = 0.0
        self._ages: list[float] = []
        self._marks: list[tuple[float, float]] = []
        self._loading = 0

    def start(self) -> None:
        self._fill()
        self._collect()

    def _fill(self) -> None:
        shape = self._shape
        ahead = self._collected + len(self._ready) + len(self._running)
        bound = (shape.max_staleness + self._version + 1) * shape.groups
        room = bound - ahead
        if shape.max_staleness and shape.max_in_flight is not None:
            room = min(room, shape.max_in_flight - len(self._running))
        for _ in range(max(room, 0)):
            group = _Group(self._started, self._version, shape.group_size)
            self._started += 1
            self._running[group.number] = group
            engine = min(self._engines, key=lambda one: one.assigned)
            engine.assigned += shape.group_size
            for index in range(shape.group_size):
                tokens = self._timings.response_tokens.draw(self._chance)
                group.tokens += tokens + self._timings.prompt_tokens
                prompt = 0.0 if index else self._timings.prompt_tokens
                engine.add(tokens, prompt, partial(self._generated, group))

    def _generated(self, group: _Group) -> None:
        group.left -= 1
        if not group.left:
            self.clock.after(self._timings.reward, self._rewarded, group)

    def _rewarded(self, group: _Group) -> None:
        del self._running[group.number]
        self._ready.append(group)
        if self._shape.max_staleness:
            self._fill()
        if self._collecting:
            self._collect()

    def _is_full(self) -> bool:
        wanted = self._shape.groups
        return len(self._ready) >= wanted and all(
            self._can_wait(due) for due in range(self._shape.max_staleness + 1)
        )

    def _can_wait(self, due: int) -> bool:
        """As `AsyncCollector._can_wait`."""
        wanted, latest = self._shape.groups, self._version - self._shape.max_staleness + due
        ready = sum(one.version <= latest for one in self._ready)
        running = sum(one.version <= latest for one in self._running.values())
        return ready + running - min(ready, wanted) <= due * wanted

    def _collect(self) -> None:
        self._collecting = not self._is_full()
        if self._collecting:
            return
        wanted = self._shape.groups
        self._ready.sort(key=lambda one: (one.version, one.number))
        batch, self._ready = self._ready[:wanted], self._ready[wanted:]
        self._collected += wanted
        self._ages.append(fmean(self._version - one.version for one in batch))
        if self._shape.max_staleness:
            self._fill()
        tokens = sum(one.tokens for one in batch)
        per_token = self._timings.score_per_token + self._timings.update_per_token
        seconds = self._timings.update + per_token * tokens / self._speed
        self._trained += seconds
        self.clock.after(seconds, self._publish)

    def _publish(self) -> None:
        self._loading = len(self._engines)
        seconds = self._timings.publish
        for engine in self._engines:
            if self._shape.partial_rollout:
                engine.pause(seconds)
                self.clock.after(seconds, self._loaded, engine)
            else:
                engine.hold(partial(self.clock.after, seconds, self._loaded, engine))

    def _loaded(self, engine: Engine) -> None:
        engine.release()
        self._loading -= 1
        if not self._loading:
            self._version += 1
            if self._shape.max_staleness:
                self._fill()
            self.clock.after(self._timings.other, self._end_step)

    def _end_step(self) -> None:
        if not self._shape.max_staleness:
            self._fill()
        self.ends.append(self.clock.now)
        busy = fmean(engine.busy for engine in self._engines)
        self._marks.append((busy, self._trained))
        self._collect()

    def prediction(self) -> Prediction:
        first, last = self.ends[_WARM - 1], self.ends[-1]
        count = len(self.ends) - _WARM
        whole = last - first
        busy, trained = (
            after - before
            for before, after in zip(self._marks[_WARM - 1], self._marks[-1], strict=True)
        )
        rollouts = count * self._shape.groups * self._shape.group_size
        return Prediction(
            step=whole / count,
            engine_idle=max(1 - busy / whole, 0.0),
            learner_idle=max(1 - trained / whole, 0.0),
            staleness=fmean(self._ages[_WARM : _WARM + count] or [0.0]),
            rollouts_per_second=rollouts / whole,
        )


def table(timings: Timings, shapes: Sequence[Shape]) -> list[tuple[Shape, Prediction]]:
    return [(shape, simulate(timings, shape)) for shape in shapes]
