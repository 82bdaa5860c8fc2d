"""How far this process has got: a number that grows whenever it gets on.

Whoever works for long calls `beat` after each piece of work (a micro-batch, an engine's step). The
driver asks for the number while it waits: one that stands still means that the worker hangs, one
that grows that it is merely slow.
"""

from __future__ import annotations

_beats = 0


def beat() -> None:
    """Note that a piece of work is done (from any thread; an increment that is lost to a race does
    no harm)."""
    global _beats
    _beats += 1


def beats() -> int:
    """Pieces of work done so far."""
    return _beats
