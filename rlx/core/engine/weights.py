"""Weights on their way from a learner to an engine: a safetensors file and its checksum."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from rlx.core.engine.interfaces import WeightsFile
from rlx.core.errors import EngineError


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Checksum of names, dtypes, shapes and bytes; the order of the tensors does not matter.

    CRC-32 per tensor (6 GB/s on one core), so that a check of every publication is affordable;
    it finds transport and bookkeeping errors, not forgeries. Tensors may be on any device.
    """
    lines = sorted(
        f"{name} {tensor.dtype} {list(tensor.shape)} {_crc32(tensor):08x}"
        for name, tensor in tensors
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _crc32(tensor: torch.Tensor) -> int:
    data = tensor.detach().cpu().contiguous()
    # NumPy has no bfloat16, so every dtype is looked at as bytes.
    return zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().data)


@contextmanager
def open_weights(weights: WeightsFile) -> Iterator[dict[str, torch.Tensor]]:
    """Map the file and yield its tensors by name, after comparing the checksum.

    The tensors are views of the mapped file: they are valid inside the `with` block only.

    Raises:
        EngineError: the file is missing or damaged, or is not the one that the learner wrote.
    """
    try:
        with safe_open(Path(weights.path), framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise EngineError(
            f"cannot read the weights of version {weights.version} from {weights.path}: {error}"
        ) from error
    found = checksum(tensors.items())
    if found != weights.checksum:
        raise EngineError(
            f"the weights of version {weights.version} in {weights.path} have checksum {found}, "
            f"the learner wrote {weights.checksum}; the engine keeps its old weights"
        )
    yield tensors
