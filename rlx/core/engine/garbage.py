"""Python's garbage collector, held back while many rollouts are made.

A batch is dozens of objects for each rollout, nearly all of which live until it is full. The
collector's default is to look at all of them again and again, and at everything else that the
process ever imported: with ten thousand rollouts that is half of the driver's time.

rlx's own objects form no cycles. Those of agents and rewards are found if they are given up soon;
others that have outlived a first look wait for a second one, which costs more, for a long time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_THRESHOLDS = (50_000, 200, 100)
"""New objects before a look at the young ones; such looks before one at the older ones; …"""


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Cycles among new objects are still found; what was there before is left alone meanwhile."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
