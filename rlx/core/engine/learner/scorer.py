"""Forward passes without gradient: the learner's own, and those of a reference model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.distributed import local_device
from rlx.core.engine.learner.memory import with_known_sizes
from rlx.core.engine.learner.model import load_policy
from rlx.core.engine.learner.packing import MicroBatch, Packable
from rlx.core.engine.learner.planning import Plan, make_plan
from rlx.core.engine.learner.sharded import on_device
from rlx.core.engine.pulse import beat


class Scorer:
    """A forward-only model; several are replicas, and know nothing of one another."""

    def __init__(
        self, *, model: str, settings: LearnerConfig, temperature: float, threads: int
    ) -> None:
        self._model = model
        self._settings = settings.forward_only()
        self._temperature = temperature
        self._threads = threads

    def start(self) -> Mapping[str, Any]:
        torch.set_num_threads(self._threads)
        loaded = load_policy(self._model, self._settings, self._temperature, local_device())
        self._policy = loaded.module.requires_grad_(False)
        self._packing = loaded.packing
        self._settings = with_known_sizes(self._settings, loaded, local_device())
        return loaded.facts()

    def score(self, batch: Packable) -> np.ndarray:
        """Log-probs [N] float32 of the batch's action tokens."""
        plan = make_plan(batch, self._settings, packing=self._packing, alone=True)
        return score_batch(self._forward, batch, plan)[0]

    def _forward(self, micro: MicroBatch, chunks: int) -> tuple[Tensor, Tensor]:
        return self._policy(*on_device(micro, local_device()), layout=micro.layout, chunks=chunks)

    def stop(self) -> None:
        del self._policy


@torch.no_grad()
def score_batch(
    forward: Callable[[MicroBatch, int], tuple[Tensor, ...]],
    batch: Packable,
    plan: Plan,
    *,
    answers: int = 1,
) -> np.ndarray:
    """The model's first answers [answers, N] float32 in the batch's order, whatever the packing.

    Args:
        forward: takes a micro-batch and the number of pieces of the vocabulary projection.
    """
    found = np.zeros((answers, batch.action_count), np.float32)
    for micro, chunks in zip(plan.micro_batches, plan.chunks, strict=True):
        for row, answer in zip(found, forward(micro, chunks), strict=False):
            row[micro.actions] = answer.cpu().numpy()
        beat()
    return found
