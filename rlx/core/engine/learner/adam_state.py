"""Adam's state of a tensor, which torch itself makes in the first step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_state(optimizer: Any, parameter: Tensor) -> dict[str, Tensor]:
    """Counter of steps and both moments, made as Adam makes them where no step was taken yet."""
    state: dict[str, Tensor] = optimizer.state[parameter]
    if not state:
        device = parameter.device if optimizer.defaults.get("fused") else "cpu"
        state["step"] = torch.zeros((), dtype=torch.float32, device=device)
        for key in MOMENTS:
            state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return state


def make_states(optimizer: Any) -> None:
    """Make all of them now: among the activations of the first update they would leave the memory
    of those in pieces, and the learner with more of it than it uses."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            adam_state(optimizer, parameter)
