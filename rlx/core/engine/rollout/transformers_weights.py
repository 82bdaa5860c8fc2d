"""New weights for a transformers model, in place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from rlx.core.engine.transfer.errors import TransferError


def load_weights(model: Any, buckets: Iterable[Mapping[str, torch.Tensor]], *, whole: bool) -> None:
    """Copy tensors into the model as they come.

    Args:
        buckets: tensors by checkpoint name; those of one bucket are gone when the next one comes.
        whole: every weight must come. `state_dict` names tied tensors more than once; one of the
            names is enough.

    Raises:
        TransferError: a name or shape does not fit, or one is missing; the model is unusable then.
    """
    state = model.state_dict(keep_vars=True)
    reached: set[int] = set()
    held: dict[str, torch.Tensor] = {}
    for tensors in buckets:
        for name, tensor in tensors.items():
            if name in state:
                reached.add(_copy(state, name, tensor))
            else:
                held[name] = tensor.clone()
    for name, tensor in _converted(model, held).items():
        reached.add(_copy(state, name, tensor))
    if whole:
        _refuse("lack", [name for name, value in state.items() if value.data_ptr() not in reached])


def _copy(state: Mapping[str, torch.Tensor], name: str, tensor: torch.Tensor) -> int:
    target = state[name]
    if target.shape != tensor.shape:
        _refuse("have the wrong shape for", [name])
    target.copy_(tensor)
    return target.data_ptr()


def _converted(model: Any, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Weights under the model's own names, from checkpoint names (which split experts, say)."""
    if not tensors:
        return {}
    with without_zero3():
        loaded, report = type(model).from_pretrained(
            None,
            config=model.config,
            state_dict=dict(tensors),
            dtype=model.dtype,
            output_loading_info=True,
        )
    _refuse("have unknown tensors:", report["unexpected_keys"])
    return {
        name: tensor
        for name, tensor in loaded.state_dict().items()
        if name not in report["missing_keys"]
    }


def _refuse(problem: str, names: Collection[str]) -> None:
    if names:
        raise TransferError(f"the published weights {problem} {', '.join(sorted(names)[:5])}")


@contextmanager
def without_zero3() -> Iterator[None]:
    """Load whole weights even while a ZeRO-3 learner in this process has its configuration set."""
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        deepspeed._hf_deepspeed_config_weak_ref = reference
