"""The policy's weights as files: safetensors for engines, a Hugging Face folder for users."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlx.core.engine.interfaces import WeightsFile
from rlx.core.engine.learner.sharded import ShardedModel
from rlx.core.engine.weights import checksum

_NOT_OURS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")


def whole_weights(policy: ShardedModel, *, keep: bool, renewed: bool = False) -> dict[str, Tensor]:
    """The model's parameters under their Hugging Face names. All ranks call it.

    Args:
        keep: false on ranks that only take part in the gathering; they get an empty dict.
        renewed: leave out what is known to be as the model started.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = _kept(policy, policy.whole_parameters(renewed=renewed), keep=keep)
    return dict(revert_weight_conversion(policy.module.model, weights)) if keep else {}


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


def write_weights(
    policy: ShardedModel, path: str, version: int, *, writer: bool
) -> WeightsFile | None:
    """Gather the weights and, on the `writer`, write them so that `path` is whole or absent."""
    from safetensors.torch import save_file

    started = time.perf_counter()
    partial = policy.adapter is not None and policy.adapter.renews_some
    weights = whole_weights(policy, keep=writer, renewed=partial)
    if not writer:
        return None
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(target.name + ".partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, aside)
        aside.rename(target)
    finally:
        aside.unlink(missing_ok=True)
    return WeightsFile(
        path=str(target),
        version=version,
        bytes=target.stat().st_size,
        checksum=checksum(weights.items()),
        seconds=time.perf_counter() - started,
        partial=partial,
    )


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
