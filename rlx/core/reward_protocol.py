"""Samples and rewards as JSON, between a run and a server that scores: one request, one reply.

    → {"id": "…", "samples": [{"prompt": …, "response": …, "label": …, …}, …]}
    ← {"rewards": [{"score": 1.0, "parts": {…}, "metrics": {…}} or {"error": "…"}, …]}

One reward per sample, in the samples' order. `score: null`: the reward does not apply. A request
without samples is answered with no rewards. The same `id` means the same request, sent again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from rlx.core.errors import ComponentError
from rlx.core.rewards import Reward, RewardInputs, excerpt
from rlx.core.rollouts import FinishReason


class Sample(BaseModel):
    """`RewardInputs` as JSON; only `prompt` and `response` are needed."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    prompt: str | list[dict[str, Any]]
    """Text, or chat messages."""
    response: str
    messages: list[dict[str, Any]] = []
    """The whole conversation; empty: the prompt and the response."""
    label: Any = None
    task: dict[str, Any] = {}
    """All columns of the task's row."""
    tokens: list[int] = []
    """Ids of what the policy sampled."""
    finish_reason: FinishReason = "stop"
    turns: int = 1
    group_id: int = 0
    """Samples with the same number are the rollouts of one task; a request has whole groups."""
    index: int = 0
    task_id: str = ""
    source: str = "data"
    metadata: dict[str, Any] = {}

    def inputs(self) -> RewardInputs:
        """Return the sample as rewards see it."""
        from rlx.core.rewards import conversation

        values = {name: getattr(self, name) for name in type(self).model_fields}
        values["messages"] = self.messages or conversation(self.prompt, self.response)
        return RewardInputs(**values)


class ScoreRequest(BaseModel):
    """What is posted to a server that scores."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)

    samples: list[Sample]
    id: str | None = Field(None, max_length=200)
    """Of this request, the same when it is sent again: it is then not scored again."""


class ScoredSample(BaseModel):
    """One sample's reward, or why there is none."""

    model_config = ConfigDict(extra="ignore")

    score: float | None = None
    parts: dict[str, float] = {}
    metrics: dict[str, float] = {}
    note: str = ""
    error: str | None = None


class ScoreReply(BaseModel):
    """What a server that scores answers."""

    model_config = ConfigDict(extra="ignore")

    rewards: list[ScoredSample]


def encode_request(samples: Sequence[RewardInputs], *, key: str) -> bytes:
    """Return the body of a request. What JSON has no form for is written as text, NaN as null."""
    rows = [
        {name: plain(getattr(sample, name)) for name in Sample.model_fields} for sample in samples
    ]
    return json.dumps({"id": key, "samples": rows}).encode()


def decode_reply(reply: Any, count: int) -> list[Reward | Exception]:
    """Return one reward per sample; an exception for one that the server could not score.

    Raises `ValueError` for an answer of another form.
    """
    answer = ScoreReply.model_validate(reply)
    if len(answer.rewards) != count:
        raise ValueError(f"it has {len(answer.rewards)} rewards for {count} samples")
    return [
        Reward(item.score, item.parts, item.metrics, item.note)
        if item.error is None
        else ComponentError(item.error)
        for item in answer.rewards
    ]


def plain(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, other objects as text, NaN as null."""
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    tolist = getattr(value, "tolist", None)
    if callable(tolist):
        return plain(tolist())
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def first_problem(error: Any) -> str:
    """Return one line for a pydantic `ValidationError`: where, what, and what stands there.

    >>> from pydantic import ValidationError
    >>> try: ScoreRequest.model_validate({"samples": [{"prompt": "x"}]})
    ... except ValidationError as error: first_problem(error)
    'samples.0.response: Field required'
    """
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "the request"
    found = "" if first["type"] == "missing" else f", not {excerpt(repr(first['input']), 80)}"
    return f"{place}: {first['msg']}{found}"
