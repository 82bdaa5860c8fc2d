"""The training state as a rank holds it: named pieces of parameters, whatever the ZeRO stage.

Each piece is a range of one flattened parameter with the float32 weights and Adam's two moments of
it. The pieces of all ranks together are the whole state, so that a checkpoint made of them can be
read by any number of ranks under any stage. What DeepSpeed keeps where is known here only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlx.core.engine.learner.adam_state import MOMENTS, adam_state
from rlx.core.engine.learner.sharded import ShardedModel

KEYS = ("fp32", *MOMENTS)
"""What there is of every element: the weight in full precision, first and second moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """A range of one parameter on this rank."""

    name: str
    start: int
    """First element, of the flattened parameter."""
    values: Mapping[str, Tensor]
    """By `KEYS`, flat float32 views [n] into the optimizer's own memory."""
    steps: Tensor
    """Adam's counter of steps, one number, shared by all pieces of one flat group."""
    replicated: bool
    """Every rank holds the same piece."""

    @property
    def count(self) -> int:
        return self.values[KEYS[0]].numel()


def trained_shapes(model: ShardedModel) -> dict[str, list[int]]:
    """Whole shapes of the parameters that are trained, by name."""
    return {
        name: list(getattr(parameter, "ds_shape", parameter.shape))
        for name, parameter in _trained(model)
    }


def fragments(model: ShardedModel) -> Iterator[Fragment]:
    """The pieces on this rank; writing into them changes the optimizer's state.

    Weights that the model computes with are copies of them; `take_over` renews those.
    """
    optimizer = model.engine.optimizer
    pieces = {0: _replicated, 1: _partitioned, 2: _partitioned, 3: _sharded}[model.stage]
    for name, parameter in _trained(model):
        piece = pieces(optimizer, parameter)
        if piece is not None:
            start, weights, moments, steps = piece
            yield Fragment(
                name=name,
                start=start,
                values={KEYS[0]: weights, **moments},
                steps=steps,
                replicated=model.stage == 0,
            )


@torch.no_grad()
def take_over(model: ShardedModel) -> None:
    """Make the weights that the model computes with those of the fragments. All ranks call it."""
    optimizer = model.engine.optimizer
    if model.stage in (1, 2):
        optimizer.update_lp_params()
    elif model.stage == 3:
        optimizer.checkpoint_event_prologue()
        for group in range(len(optimizer.fp32_partitioned_groups_flat)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)
        optimizer.checkpoint_event_epilogue()


def _trained(model: ShardedModel) -> Iterator[tuple[str, Any]]:
    return (
        (name, parameter)
        for name, parameter in model.module.named_parameters()
        if parameter.requires_grad
    )


_Piece = tuple[int, Tensor, dict[str, Tensor], Tensor]
"""First element, weights, moments, counter of steps."""


def _replicated(optimizer: Any, parameter: Any) -> _Piece:
    """Stage 0: torch's own optimizer, on whole parameters."""
    state = adam_state(optimizer, parameter)
    moments = {key: state[key].view(-1) for key in MOMENTS}
    return 0, parameter.detach().view(-1), moments, state["step"]


def _partitioned(optimizer: Any, parameter: Any) -> _Piece | None:
    """Stages 1 and 2: a rank's share of each group is one flat tensor, cut without regard to
    parameters."""
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    flat = optimizer.optimizer.param_groups[mapping.param_group_index]["params"][0]
    place = mapping.hp_fragment_address
    weights, moments, steps = _range(optimizer.optimizer, flat, place.start, place.numel)
    return mapping.lp_fragment_address.start, weights, moments, steps


def _sharded(optimizer: Any, parameter: Any) -> _Piece | None:
    """Stage 3: each parameter is cut into equal shares, the last one padded."""
    group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
    start = parameter.ds_tensor.ds_numel * torch.distributed.get_rank(parameter.ds_process_group)
    size = min(size, parameter.ds_numel - start)
    if size <= 0:
        return None
    flat = optimizer.fp32_partitioned_groups_flat[group]
    return start, *_range(optimizer.optimizer, flat, offset, size)


def _range(
    optimizer: Any, flat: Tensor, start: int, count: int
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    state = adam_state(optimizer, flat)
    moments = {key: state[key].narrow(0, start, count) for key in MOMENTS}
    return flat.detach().narrow(0, start, count), moments, state["step"]
