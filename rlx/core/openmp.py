"""How the threads of a worker's arithmetic wait for each other, and what must not change them.

Between two parallel pieces of a forward pass lie some microseconds. A thread that sleeps meanwhile
costs a third of a small model's step; one that spins for long takes the core from the very thread
that it waits for, as soon as the machine has other work (docs/performance.md). So threads spin for
some ten microseconds, and then sleep.

OpenMP reads its variables when torch loads it. Workers under Ray have them from their start; for
workers in the driver's process the command line sets them first of all, and the engine's package
when it is imported.
"""

from __future__ import annotations

import os

_CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_SHORT_SPINS = {
    # Turns of spinning; `active` has them also where a process has more threads than cores (an
    # engine's and a learner's, which take turns).
    "GOMP_SPINCOUNT": "1000",
    "OMP_WAIT_POLICY": "active",
    "KMP_BLOCKTIME": "0",
}


def openmp_environment() -> dict[str, str]:
    """Variables that must be set before torch is imported.

    Where the environment says how threads wait (`OMP_WAIT_POLICY=passive` on a machine that has
    other work), that is handed on.
    """
    waiting = {name: os.environ[name] for name in _CHOSEN_BY_USERS if name in os.environ}
    return {
        **(waiting or _SHORT_SPINS),
        # The number of threads, and with it every rounding, must not depend on the machine's load.
        "OMP_DYNAMIC": "false",
        "MKL_DYNAMIC": "false",
    }
