"""The trained model as files: a Hugging Face folder of it, or of its adapter."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.core.engine.learner.sharded import ShardedModel

_NOT_OURS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")


def _kept(
    policy: ShardedModel, named: Iterator[tuple[str, Tensor]], *, keep: bool
) -> dict[str, Tensor]:
    """The tensors, once they are all there; none on a rank that does not keep them."""
    if not keep and policy.stage != 3:  # others need nothing of this rank
        return {}
    weights = {}
    for name, tensor in named:
        if keep:
            # What ZeRO-3 gathered goes away again.
            weights[name] = tensor.clone() if policy.stage == 3 else tensor
    return weights


def export_model(policy: ShardedModel, source: str, folder: str, *, writer: bool) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load. All ranks call it."""
    weights = _kept(policy, policy.whole_parameters(), keep=writer)
    if writer:
        _write_model(policy, source, folder, weights)


def _write_model(
    policy: ShardedModel, source: str, folder: str, weights: dict[str, Tensor]
) -> None:
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    plain(policy.module.model).save_pretrained(target, state_dict=weights)
    copy_tokenizer(source, target)


def export_adapter(policy: ShardedModel, source: str, folder: str, *, writer: bool) -> None:
    """Write the adapter alone, in peft's format, with the tokenizer. All ranks call it."""
    assert policy.adapter is not None
    weights = _kept(policy, policy.adapter_parameters(), keep=writer)
    if writer:
        _write_adapter(policy, source, folder, weights)


def _write_adapter(
    policy: ShardedModel, source: str, folder: str, weights: dict[str, Tensor]
) -> None:
    assert policy.adapter is not None
    policy.adapter.save(weights, Path(folder))
    copy_tokenizer(source, Path(folder))


def held_weights(policy: ShardedModel, *, writer: bool, copy: bool) -> dict[str, Tensor] | None:
    """What `write_held` writes, on the `writer`: the adapter where there is one, else the model.

    All ranks call it.

    Args:
        copy: the weights change before they are written.
    """
    whole = policy.whole_parameters if policy.adapter is None else policy.adapter_parameters
    named = whole()
    if copy and writer:
        named = ((name, tensor.to("cpu", copy=True)) for name, tensor in named)
    weights = _kept(policy, named, keep=writer)
    return weights if writer else None


def write_held(policy: ShardedModel, source: str, folder: str, weights: dict[str, Tensor]) -> None:
    """Write the folder of a checkpoint for others than rlx."""
    write = _write_model if policy.adapter is None else _write_adapter
    write(policy, source, folder, weights)


def plain(model: Any) -> Any:
    """A model of the same class that a folder of weights that are not quantised can be made of."""
    if getattr(model.config, "quantization_config", None) is None:
        return model
    config = copy.deepcopy(model.config)
    del config.quantization_config
    with torch.device("meta"):
        return type(model)(config)


def copy_tokenizer(source: str, target: Path) -> None:
    """Copy what lies beside the weights (tokenizer, chat template, licence), byte for byte."""
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(target)
        return
    for path in Path(source).iterdir():
        if path.is_file() and path.suffix not in _NOT_OURS and path.name not in _WRITTEN:
            shutil.copy2(path, target / path.name)
