"""What is done about a component's call in the driver that takes longer than its time-out: stacks
are written, it is ended by an exception, or else the process is."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from rlx.core import calls
from rlx.core.calls import Call, OverdueError

_GRACE = 30.0
"""Seconds that a call has to end by exceptions; but no more than its time-out."""
_EVERY = 1.0
"""Seconds between two of them."""


class Driven(Protocol):
    """The run whose loop is watched; all of it is called in threads other than the loop's."""

    @property
    def where(self) -> str:
        """Step and phase, for messages."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds that a component's call may take."""
        ...

    @property
    def ends(self) -> bool:
        """Whether a call is ended after that; else it is only told."""
        ...

    @property
    def next_step(self) -> str:
        """How to go on after the run has ended, as a clause."""
        ...

    def tell(self, text: str) -> None:
        """Say it where the run's user looks; returns at once, whatever that waits for."""
        ...

    def write_stacks(self, loop: asyncio.AbstractEventLoop) -> str:
        """Write where all threads of all workers and of the driver are; returns where that is, as
        a clause (`; the stacks of …`), or why it could not be done."""
        ...

    def cut(self, why: str) -> None:
        """End the process at once."""
        ...


def end_call(loop: asyncio.AbstractEventLoop, thread: int, call: Call, run: Driven) -> None:
    """Write stacks, then end the call of a loop's thread; where that can't be done, the process.

    Waits for nothing but time, and is unblocked by the end of the call.
    """
    at = calls.place(call, thread)
    what = (
        f"{run.where}: {call.who} has not returned for {run.timeout:g} s "
        f"(faults.component_timeout){at and f'; it is at {at}'}"
    )
    stacks = run.write_stacks(loop)
    if not run.ends:
        run.tell(f"{what}{stacks}. Inline, nothing ends it but Ctrl-C")
        return
    then = "it is switched off for the rest of the run" if call.observer else run.next_step
    error = OverdueError(f"{what}, and is ended there{stacks}; {then}")
    waited, patience = 0.0, min(_GRACE, run.timeout)
    while call.is_under_way(thread):
        if waited >= patience:
            run.cut(
                f"{what}, and no exception has ended it within {waited:.0f} s, so the process "
                f"ends{stacks}; {run.next_step}"
            )
            return
        call.end(thread, error)
        time.sleep(_EVERY)
        waited += _EVERY
