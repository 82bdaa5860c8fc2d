"""How long the parts of a run take: given in a file, or fitted to a recorded run."""

from __future__ import annotations

import math
import random
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rlx.core.config_base import Part


def _listed(value: Any) -> Any:
    return {"values": value} if isinstance(value, list) else value


class Lengths(Part):
    """Tokens of responses: recorded `values`, or a log-normal distribution."""

    values: list[int] = []
    mean: float = Field(1.0, gt=0)
    cv: float = Field(0.0, ge=0)
    """Standard deviation divided by the mean."""
    most: int | None = Field(None, ge=1)
    """Where longer ones are cut off (`rollout.max_new_tokens`)."""

    def draw(self, chance: random.Random) -> int:
        if self.values:
            return chance.choice(self.values)
        sigma = math.sqrt(math.log1p(self.cv**2))
        drawn = chance.lognormvariate(math.log(self.mean) - sigma**2 / 2, sigma)
        return max(1, min(round(drawn), self.most or round(drawn)))


class Timings(Part):
    """Seconds. A token step of an engine takes `step` + `step_per_sequence` · sequences."""

    response_tokens: Annotated[Lengths, BeforeValidator(_listed)] = Lengths()
    prompt_tokens: float = Field(0.0, ge=0)
    """Mean; a group's rollouts share it in the engine."""
    step: float = Field(ge=0)
    """Of an engine, for a token of every running sequence: its fixed part."""
    step_per_sequence: float = Field(ge=0)
    prefill_per_token: float = Field(0.0, ge=0)
    """Of an engine; nothing is sampled meanwhile."""
    reward: float = Field(0.0, ge=0)
    """From the end of a group's generation to its last reward."""
    score_per_token: float = Field(0.0, ge=0)
    """Of one rank: reference, old log-probs and values, for every token, prompts included."""
    update: float = Field(0.0, ge=0)
    """Of the learner: its fixed part."""
    update_per_token: float = Field(ge=0)
    """Of one rank, for every token, prompts included."""
    publish: float = Field(0.0, ge=0)
    other: float = Field(0.0, ge=0)
    """Of the driver in each step, while engines go on."""
    rank_efficiency: float = Field(1.0, gt=0, le=1)
    """Share of one rank's speed that each has after every doubling of the ranks."""
