"""What the ranks do together for one batch: as many micro-batches each, as many head calls each.

With ZeRO-3 every module call gathers its parameters from all ranks, so all ranks must make the same
calls; a rank with less to do runs idle micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.attention import Packing
from rlx.core.engine.learner.distributed import gather
from rlx.core.engine.learner.flat_packing import make_flat_micro_batches
from rlx.core.engine.learner.packing import (
    MicroBatch,
    Packable,
    idle_micro_batch,
    make_micro_batches,
)
from rlx.core.objective import Denominators


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """This rank's part of one pass over a batch that all ranks share."""

    micro_batches: list[MicroBatch]
    chunks: list[int]
    """Pieces of the vocabulary projection, for each micro-batch."""
    denominators: Denominators
    """Counts over all ranks."""


def make_plan(
    batch: Packable, settings: LearnerConfig, *, packing: Packing, alone: bool = False
) -> Plan:
    """Pack this rank's share. All ranks call it together, unless `alone`.

    Args:
        settings: with numbers for `token_budget` and `logprob_chunk`.
    """
    budget = settings.token_budget
    assert budget != "auto"
    assert settings.logprob_chunk != "auto"
    mine = (
        make_flat_micro_batches(
            batch, token_budget=budget, worth=packing.worth, whole=packing.whole
        )
        if packing.flat
        else make_micro_batches(
            batch,
            row_tokens=settings.row_tokens,
            token_budget=budget,
            packed=packing.several,
            whole=packing.whole,
        )
    )
    chunks = [_chunks(micro.action_count, settings.logprob_chunk) for micro in mine]
    counts = (chunks, batch.action_count, batch.rollout_count)
    everyone = [counts] if alone else gather(counts)
    number = max(len(theirs) for theirs, _, _ in everyone)
    return Plan(
        micro_batches=mine + [idle_micro_batch()] * (number - len(mine)),
        chunks=[
            max(theirs[index] for theirs, _, _ in everyone if index < len(theirs))
            for index in range(number)
        ],
        denominators=Denominators(
            tokens=sum(tokens for _, tokens, _ in everyone),
            sequences=sum(rollouts for _, _, rollouts in everyone),
        ),
    )


def _chunks(count: int, size: int) -> int:
    return -(-count // size) if size and count > size else 1
