"""What the parts of the engine say to one another: requests, replies and protocols.

Every worker is a plain class: constructed from picklable keyword arguments, in the driver's process
(`--runtime inline`) or in a Ray actor (`--runtime ray`), and called method by method.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import numpy as np

from rlx.core.engine.trace import Span
from rlx.core.generation import Generation as Generation
from rlx.core.generation import Sampling as Sampling
from rlx.core.rollouts import TrainBatch

FileMarks: TypeAlias = Mapping[str, tuple[int, int]]
"""By file, relative to a folder: bytes and CRC-32 of what was meant to be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One continuation to sample. Same prompt, sampling and seed give the same tokens."""

    id: int
    prompt: Sequence[int]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a publication did on the receiving side."""

    version: int
    seconds: float
    bytes: int
    checksum: str
    """Of the tensors as the engine received them; equal to the learner's `WeightsFile.checksum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsFile:
    """Weights that a learner laid down for engines to map: a safetensors file in shared memory."""

    path: str
    version: int
    bytes: int
    seconds: float
    checksum: str
    partial: bool = False
    """Tensors that are not in it are those that the engine was started with."""


class RolloutEngine(Protocol):
    """What generates. `generate` adds all requests at once, so that the batch that the engine runs,
    and with it every rounding, does not depend on timing."""

    def start(self) -> Mapping[str, Any]:
        """Load the model; returns facts for the manifest (`{"engine": …, "context_length": …}`)."""
        ...

    def generate(self, requests: Sequence[GenerateRequest]) -> AsyncIterator[list[Generation]]:
        """Yield finished generations as they come; every request is answered exactly once."""
        ...

    async def abort(self) -> None:
        """End all running requests with `finish_reason="abort"` and their partial output."""
        ...

    async def load_weights(self, weights: WeightsFile) -> PublishReport:
        """Replace the weights in place and drop every cached prefix."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory up until the next `load_weights`; nothing may run meanwhile."""
        ...

    async def forget(self) -> None:
        """Drop every cached prefix, so that what comes does not depend on what went before."""
        ...

    async def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """What one training step did to the model."""

    metrics: Mapping[str, float]
    """`policy/*` or `critic/*`, `mismatch/*`, `correction/*`, `memory/*` (docs/metrics.md)."""
    logprobs: np.ndarray | None = None
    """[N] float32, of each action token under the policy's weights *before* the step."""
    spans: Sequence[Span] = ()
    """What the first rank did when, for the trace."""


class Learner(Protocol):
    """One rank of the data-parallel group that trains one model. All ranks are called together."""

    def start(self) -> Mapping[str, Any]:
        """Load the model and the optimizer; returns facts (`{"parameters": …, "trainable": …}`)."""
        ...

    def score(self, batch: TrainBatch) -> np.ndarray:
        """Log-probs (a critic: values) [N] of this rank's batch under the current weights."""
        ...

    def update(self, batches: Sequence[TrainBatch], *, step: int) -> UpdateResult | None:
        """Train on this rank's share of each optimizer step, in order. None when `abort` came
        before the first one."""
        ...

    def abort(self) -> None:
        """Ask a running `update` to give up before its first optimizer step."""
        ...

    def write_weights(self, path: str, version: int) -> WeightsFile | None:
        """All ranks gather, rank 0 writes and answers."""
        ...

    def hold(self, *, copy: bool, export: bool) -> None:
        """Take hold of the state for a checkpoint, and with `export` of the model, a copy where
        training goes on before it is written. All ranks take part."""
        ...

    async def write_held(self, state: str, model: str | None) -> FileMarks:
        """Write what is held into the folders `state` and `model`, beside whatever else runs, and
        let go of it."""
        ...

    def load(self, folder: str) -> None: ...

    def export(self, folder: str, *, adapter: bool = False) -> None:
        """Write a Hugging Face model folder, or of an adapter the adapter alone (rank 0; all
        ranks take part)."""
        ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReply:
    """One sample's reward from one component."""

    score: float | None
    """None: the component failed; `error` says how."""
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    error: str | None = None
