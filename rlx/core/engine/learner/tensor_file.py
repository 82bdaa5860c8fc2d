"""Writing float32 tensors as a safetensors file while another thread trains.

The library's own writer copies every tensor with the interpreter's lock held, which would stall
the training that goes on meanwhile; plain writes of a tensor's memory let go of it.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

_PIECE = 1 << 24
"""Bytes per write."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write the tensors [float32, any device]; returns bytes and CRC-32 of what was meant.

    Raises:
        OSError: of the file system.
    """
    header, end = {}, 0
    for name, tensor in tensors.items():
        size = 4 * tensor.numel()
        header[name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data begin at a multiple of 8
    start = struct.pack("<Q", len(text)) + text
    crc = zlib.crc32(start)
    with path.open("wb") as file:
        file.write(start)
        for tensor in tensors.values():
            if tensor.numel():
                flat = tensor.detach().to("cpu", torch.float32).contiguous().view(-1)
                data = memoryview(flat.numpy().data).cast("B")
                for first in range(0, len(data), _PIECE):
                    piece = data[first : first + _PIECE]
                    crc = zlib.crc32(piece, crc)
                    file.write(piece)
    return len(start) + end, crc
