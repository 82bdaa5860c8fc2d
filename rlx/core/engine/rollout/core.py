"""What an engine's core does, one step at a time, and the checks that both cores share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from rlx.core.engine.interfaces import GenerateRequest, Generation, PublishReport, WeightsUpdate
from rlx.core.engine.rollout.stats import EngineStats
from rlx.core.errors import EngineError

Key: TypeAlias = int
"""A running request; request ids are the caller's and may repeat between callers."""
Finished: TypeAlias = list[tuple[Key, Generation]]


class EngineCore(Protocol):
    """A synchronous engine. Every method runs on the engine's thread.

    An `EngineError` refuses one call and leaves the core usable; any other exception means that the
    core is broken.
    """

    def start(self) -> Mapping[str, Any]:
        """Load the model; returns facts for the manifest."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise `EngineError` for a request that can't run."""
        ...

    def add(self, key: Key, request: GenerateRequest) -> None: ...

    def busy(self) -> bool:
        """Whether `step` has something to do."""
        ...

    def step(self) -> Finished:
        """Sample one token for every running request; returns those that finished."""
        ...

    def abort(self, keys: Sequence[Key]) -> Finished:
        """End these requests with their partial output."""
        ...

    def load_weights(self, update: WeightsUpdate) -> PublishReport:
        """Take the weights that a learner sends; an engine that sleeps wakes up."""
        ...

    def sleep(self, level: int) -> None:
        """Give up device memory. 1: the cache, and weights move to the host; 2: both are lost."""
        ...

    def take_stats(self) -> EngineStats:
        """What the core did since the last call."""
        ...

    def forget(self) -> None:
        """Drop every cached prefix."""
        ...

    def stop(self) -> None: ...


class Stretches:
    """Which weights sampled which tokens of a running request."""

    __slots__ = ("_ends", "version")

    def __init__(self, version: int) -> None:
        self.version = version
        """When the request came."""
        self._ends: list[tuple[int, int]] = []

    def replaced(self, version: int, tokens: int) -> None:
        """The weights are to be replaced by `version`, with `tokens` sampled so far."""
        if not tokens:
            self.version, self._ends = version, []
            return
        self._ends.append((version, tokens))

    def of(self, tokens: int) -> list[tuple[int, int]]:
        """(version, tokens) in order, once `tokens` are sampled; empty where nothing changed."""
        found, start, version = [], 0, self.version
        for following, end in [*self._ends, (0, tokens)]:
            if end > start:
                found.append((version, end - start))
            start, version = end, following
        return found if len(found) > 1 else []


def check_request(request: GenerateRequest, *, context_length: int, vocabulary: int) -> None:
    """Raise `EngineError` when the prompt is empty, too long or has ids outside the vocabulary."""
    prompt, new = len(request.prompt), request.sampling.max_new_tokens
    if not prompt:
        raise EngineError(f"request {request.id} has an empty prompt")
    if prompt + new > context_length:
        raise EngineError(
            f"request {request.id} needs {prompt} prompt + {new} new = {prompt + new} tokens, "
            f"the engine's context is {context_length}"
        )
    smallest, largest = min(request.prompt), max(request.prompt)
    if smallest < 0 or largest >= vocabulary:
        bad = smallest if smallest < 0 else largest
        raise EngineError(f"request {request.id}: token {bad} is not in 0 … {vocabulary - 1}")


def end_token_ids(model: str, config: Any) -> tuple[int, ...]:
    """End-of-sequence tokens of a model: of its generation config and of its config."""
    from transformers import GenerationConfig

    found = [config.eos_token_id, config.get_text_config().eos_token_id]
    # A checkpoint need not have one.
    with contextlib.suppress(OSError):
        found.append(GenerationConfig.from_pretrained(model).eos_token_id)
    return merged(*(_ids(item) for item in found))


def _ids(value: int | Sequence[int] | None) -> Sequence[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def merged(*groups: Iterable[int]) -> tuple[int, ...]:
    """Distinct ids in ascending order."""
    return tuple(sorted({int(item) for group in groups for item in group}))
