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
class WeightsLink:
    """Where an engine finds the learner that sends it weights."""

    key: str
    """Names the sender; a new one makes an engine connect anew."""
    transport: str
    """`nccl`, `ipc`; otherwise buckets, with `auto` over a channel that the sender chooses."""
    address: str
    port: int
    """Of the sender's store, where its receivers meet."""

    @property
    def keeps_nothing(self) -> bool:
        """Whether what was sent is known to be nowhere afterwards. `auto` may have become gloo."""
        return self.transport in ("gloo", "nccl", "ipc")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsUpdate:
    """Asks an engine to take the weights that a learner sends meanwhile."""

    link: WeightsLink
    number: int
    """Of the publication on its link, from 0."""
    version: int
    base: int | None = None
    """None: all weights come. Else only some do, and the others are those of this version."""
    init_info: Mapping[str, Any] = field(default_factory=dict)
    """For `nccl` and `ipc`: vLLM's initialization of its receiving end."""
    update_info: Mapping[str, Any] = field(default_factory=dict)
    """For `nccl` and `ipc`: vLLM's description of what comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentWeights:
    """What the learner sent."""

    version: int
    bytes: int
    checksum: str
    """Empty where the transport computes none (`nccl`, `ipc`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishReport:
    """What a publication did on the receiving side."""

    version: int
    seconds: float
    """From the moment when all engines were ready until this one had the weights."""
    checksum: str
    """Of the tensors as the engine received them; equal to the learner's `SentWeights.checksum`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationPlan:
    """What the driver asks a learner to publish, and how."""

    version: int
    base: int | None
    """Version that the engines have, so that what training leaves alone need not be sent; None:
    send everything."""
    transport: str
    receivers: int
    """Worker processes of all engines."""
    bucket: int
    """Bytes."""


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

    async def load_weights(self, update: WeightsUpdate) -> PublishReport:
        """Replace the weights in place, as they come, and drop every cached prefix."""
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

    def offer_weights(self, plan: PublicationPlan) -> WeightsUpdate | None:
        """Prepare a publication; rank 0 answers what engines must know to take it."""
        ...

    def send_weights(self) -> SentWeights | None:
        """Send what was offered: all ranks gather, rank 0 sends and answers."""
        ...

    def abort_publication(self) -> None:
        """Have a running `send_weights` give up."""
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
