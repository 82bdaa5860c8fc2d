"""Clipped surrogate whose tokens with negative advantage are weighted to balance the others.

    up     ←  decay · up   + (1 − decay) · mean(max(A, 0))       over the whole step
    down   ←  decay · down + (1 − decay) · mean(max(−A, 0))
    w      =  balance · up / down     within [1/limit, limit]    of the steps before this one
    loss   =  −min(ρA, clip(ρ, 1 − low, 1 + high) · A) · (w where A < 0, else 1)

When most answers are wrong, pushing all of them down moves the policy further than pulling the few
right ones up, and entropy collapses. The separate clips are those of DAPO (arXiv:2503.14476), the
weight follows asymmetric REINFORCE (arXiv:2506.20520).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Lt

from rlx import LossInputs, LossOutputs, Tensor


class Asymmetric:
    """Policy gradient that pulls up as hard as it pushes down, whatever the share of right answers.

    Source: arXiv:2503.14476, arXiv:2506.20520.

    Args:
        low: how far the ratio of a token with negative advantage may fall below 1.
        high: how far the ratio of a token with positive advantage may rise above 1.
        balance: wanted quotient of the pushes down and the pulls up.
        decay: how much of the running means a step keeps.
        limit: largest weight, and the inverse of the smallest.
    """

    def __init__(
        self,
        *,
        low: Annotated[float, Gt(0), Lt(1)] = 0.2,
        high: Annotated[float, Gt(0)] = 0.28,
        balance: Annotated[float, Gt(0)] = 1.0,
        decay: Annotated[float, Ge(0), Lt(1)] = 0.9,
        limit: Annotated[float, Ge(1)] = 4.0,
    ) -> None:
        self.low, self.high = low, high
        self.balance, self.decay, self.limit = balance, decay, limit
        self.up = self.down = 0.0
        self.weight = 1.0
        self.step: int | None = None

    def __call__(self, x: LossInputs) -> LossOutputs:
        """Surrogate of each action token [N]; `policy/negative_weight` shows w."""
        self._begin(x)
        clipped = x.ratio.clamp(1 - self.low, 1 + self.high)
        surrogate = -torch.minimum(x.ratio * x.advantages, clipped * x.advantages)
        weights = torch.where(x.advantages < 0, self.weight, 1.0).to(surrogate.dtype)
        return LossOutputs(
            surrogate * weights,
            metrics={"negative_weight": surrogate.new_tensor(self.weight)},
        )

    def _begin(self, x: LossInputs) -> None:
        """Take in a new step, once: all of its micro-batches get the same weight."""
        step = x.metadata.get("step")
        if step is None or step == self.step:
            return
        self.step = step
        if self.up > 0 and self.down > 0:
            wanted = self.balance * self.up / self.down
            self.weight = min(max(wanted, 1 / self.limit), self.limit)
        self.up = self._mean(self.up, x.step_advantages.clamp(min=0))
        self.down = self._mean(self.down, (-x.step_advantages).clamp(min=0))

    def _mean(self, before: float, values: Tensor) -> float:
        return self.decay * before + (1 - self.decay) * float(values.mean())

    def state_dict(self) -> dict[str, Any]:
        return {"up": self.up, "down": self.down, "weight": self.weight, "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.up, self.down = state["up"], state["down"]
        self.weight, self.step = state["weight"], state["step"]
