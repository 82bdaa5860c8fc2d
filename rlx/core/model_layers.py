"""The matrices of a model, from the headers of its files: names and shapes; no weights are read."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rlx.core.models import ModelInfo, stored_shapes

_NOT_LINEAR = re.compile(r"(^|\.)(\w*embed\w*|wte|wpe|lm_head|score|classifier)$")


def linear_layers(info: ModelInfo) -> Mapping[str, tuple[int, int]]:
    """Shape of each linear layer's weight by the layer's name; embeddings and heads are none.

    Empty where the model's files are not on this machine, or are not safetensors.
    """
    shapes = {} if info.folder is None else stored_shapes(info.folder)
    layers = {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in shapes.items()
        if len(shape) == 2 and name.endswith(".weight")
    }
    return {name: shape for name, shape in layers.items() if not _NOT_LINEAR.search(name)}


def module_names(info: ModelInfo) -> frozenset[str]:
    """Names of the modules that have weights, and of those around them."""
    names = set()
    for name in {} if info.folder is None else stored_shapes(info.folder):
        parts = name.split(".")[:-1]
        names |= {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return frozenset(names)


def ends_with(name: str, end: str) -> bool:
    """Whether a module's name is `end`, or ends in it as in a whole word.

    >>> ends_with("layers.0.q_proj", "q_proj"), ends_with("layers.0.q_proj", "proj")
    (True, False)
    """
    return name == end or name.endswith(f".{end}")
