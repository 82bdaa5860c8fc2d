"""One rollout engine in virtual time: continuous batching, in which all sequences go equally fast.

With n running sequences a token of each takes `step` + n · `step_per_sequence` seconds. What a
sequence has got is counted in tokens that every sequence has got since the start, so that only the
shortest has to be looked at.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from rlx.core.simulation.clock import Clock
from rlx.core.simulation.timings import Timings


class Engine:
    """Args:
    running: sequences that it runs at once; others wait.
    """

    def __init__(self, clock: Clock, timings: Timings, *, running: int) -> None:
        self._clock = clock
        self._timings = timings
        self._most = running
        self._active: list[tuple[float, int, Callable[[], None]]] = []
        self._waiting: deque[tuple[int, float, Callable[[], None]]] = deque()
        self._given = 0.0
        """Tokens that every sequence has got so far."""
        self._stalled = 0.0
        """Seconds of prefill still to do."""
        self._since = 0.0
        self._number = 0
        self._alarm = 0
        self._held = False
        self._older = 0
        """Waiting requests from before it was held."""
        self._when_empty: Callable[[], None] | None = None
        self.assigned = 0
        """Requests that run, wait or are sure to come."""
        self.busy = 0.0
        """Seconds with a sequence so far."""

    def add(self, tokens: int, prompt: float, done: Callable[[], None]) -> None:
        """Ask for `tokens` after a prompt of which `prompt` tokens are not in the cache."""
        self._waiting.append((tokens, prompt, done))
        self._admit()

    def hold(self, when_empty: Callable[[], None]) -> None:
        """Finish what runs, then call; what is asked for meanwhile waits until `release`."""
        self._held, self._older = True, len(self._waiting)
        self._when_empty = when_empty
        self._admit()

    def pause(self, seconds: float) -> None:
        """Stand still, with whatever runs."""
        self._pass()
        self._stalled += seconds
        self._rearm()

    def release(self) -> None:
        self._held, self._older = False, 0
        self._admit()

    def _admit(self) -> None:
        self._pass()
        while self._waiting and len(self._active) < self._most and (self._older or not self._held):
            self._older = max(self._older - 1, 0)
            tokens, prompt, done = self._waiting.popleft()
            self._number += 1
            heapq.heappush(self._active, (self._given + tokens, self._number, done))
            self._stalled += prompt * self._timings.prefill_per_token
        if self._held and not self._active and not self._older and self._when_empty is not None:
            empty, self._when_empty = self._when_empty, None
            empty()
        self._rearm()

    def _pace(self) -> float:
        return self._timings.step + self._timings.step_per_sequence * len(self._active)

    def _pass(self) -> None:
        """Bring the counters up to now."""
        passed, self._since = self._clock.now - self._since, self._clock.now
        if self._active:
            self.busy += passed
        stalled = min(self._stalled, passed)
        self._stalled -= stalled
        if self._active:
            self._given += (passed - stalled) / max(self._pace(), 1e-12)

    def _rearm(self) -> None:
        self._alarm += 1
        if self._active:
            left = max(self._active[0][0] - self._given, 0.0) * self._pace()
            self._clock.after(self._stalled + left, self._finish, self._alarm)

    def _finish(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._pass()
        finished = []
        while self._active and self._active[0][0] <= self._given + 1e-6:
            finished.append(heapq.heappop(self._active)[2])
        for done in finished:
            self.assigned -= 1
            done()
        self._admit()
