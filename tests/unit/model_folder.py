"""A model folder with a config and a safetensors header, made without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
"""The config of SmolLM2-135M."""


def make_model(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, tuple[str, list[int], int]] | None = None,
) -> Path:
    """Write the folder; `tensors`: name → dtype, shape, bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or LLAMA))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in (tensors or {"w": ("F32", [4], 16)}).items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder
