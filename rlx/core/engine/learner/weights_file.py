"""The policy's weights as files: safetensors for engines, a Hugging Face folder for users."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from torch import Tensor

from rlx.core.engine.interfaces import WeightsFile
from rlx.core.engine.learner.sharded import ShardedModel
from rlx.core.engine.weights import checksum

_NOT_OURS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_WRITTEN = ("config.json", "generation_config.json", "model.safetensors.index.json")


def whole_weights(policy: ShardedModel, *, keep: bool) -> dict[str, Tensor]:
    """The model's parameters under their Hugging Face names. All ranks call it.

    Args:
        keep: false on ranks that only take part in the gathering; they get an empty dict.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = {}
    for name, tensor in policy.whole_parameters():
        if keep:
            # What ZeRO-3 gathered goes away again.
            weights[name] = tensor.clone() if policy.stage == 3 else tensor
    return dict(revert_weight_conversion(policy.module.model, weights)) if keep else {}


def write_weights(
    policy: ShardedModel, path: str, version: int, *, writer: bool
) -> WeightsFile | None:
    """Gather the weights and, on the `writer`, write them so that `path` is whole or absent."""
    from safetensors.torch import save_file

    started = time.perf_counter()
    weights = whole_weights(policy, keep=writer)
    if not writer:
        return None
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    try:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, partial)
        partial.rename(target)
    finally:
        partial.unlink(missing_ok=True)
    return WeightsFile(
        path=str(target),
        version=version,
        bytes=target.stat().st_size,
        checksum=checksum(weights.items()),
        seconds=time.perf_counter() - started,
    )


def export_model(policy: ShardedModel, source: str, folder: str, *, writer: bool) -> None:
    """Write a folder that `AutoModelForCausalLM` and `AutoTokenizer` load. All ranks call it."""
    weights = {}
    for name, tensor in policy.whole_parameters():
        if writer:
            weights[name] = tensor.clone() if policy.stage == 3 else tensor
    if not writer:
        return
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    policy.module.model.save_pretrained(target, state_dict=weights)
    _copy_tokenizer(source, target)


def _copy_tokenizer(source: str, target: Path) -> None:
    """Copy what lies beside the weights (tokenizer, chat template, licence), byte for byte."""
    if not Path(source).is_dir():
        from transformers import AutoTokenizer

        AutoTokenizer.from_pretrained(source).save_pretrained(target)
        return
    for path in Path(source).iterdir():
        if path.is_file() and path.suffix not in _NOT_OURS and path.name not in _WRITTEN:
            shutil.copy2(path, target / path.name)
