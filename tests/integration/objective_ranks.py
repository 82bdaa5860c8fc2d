"""What each of two ranks does in the tests of offline training."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from objective_cases import (
    OBJECTIVES,
    SPLIT,
    gradient_of,
    others_of,
    rows_for,
    started_objective,
)

from rlx.core.engine.shares import balanced_shares

WORLD = 2


def main(rank: int, port: int, model: str, folder: str) -> None:
    """Entry point of a spawned rank."""
    seen: dict[str, Any] = {}
    try:
        for name in OBJECTIVES:
            seen[name] = _gradient(name, model, rank, port)
        seen["fewer rows than ranks"] = _gradient("dpo", model, rank, port, count=1)
        torch.distributed.barrier()
    except BaseException:
        seen["traceback"] = traceback.format_exc()
    with (Path(folder) / f"rank-{rank}.pickle").open("wb") as file:
        pickle.dump(seen, file)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort an ordinary exit of the interpreter.
    os._exit(0)


def _gradient(name: str, model: str, rank: int, port: int, *, count: int = 12) -> Any:
    seat = {"rank": rank, "world": WORLD, "master_port": port, "zero_stage": 0}
    learner = started_objective(model, name, **seat, **SPLIT)
    batch = rows_for(name, count=count)
    others = others_of(name, batch)
    share = balanced_shares(batch.row_lengths, WORLD)[rank]
    mine = None if others is None else others.take(share)
    return gradient_of(learner, batch.take(share), mine)
