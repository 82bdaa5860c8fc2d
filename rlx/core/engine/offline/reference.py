"""Log-probs of the reference model on fixed data: computed once, kept in a file.

The file's name holds what they depend on: the model's weights, the dtype, every token, and which of
them are trained. So a file that is there is right, for a resumed run and for other runs.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

from rlx.core.offline.rows import RowBatch

_TOKENS_AT_ONCE = 1 << 14
"""Between two reports of progress: some seconds on a CPU, full micro-batches on a GPU."""


async def with_reference(
    rows: RowBatch,
    score: Callable[[RowBatch], Awaitable[np.ndarray]],
    *,
    folder: Path,
    model: str,
    dtype: str,
    status: Callable[[str], None],
) -> RowBatch:
    """The rows with `ref_logprobs`, from the file in `folder` or by `score`."""
    path = folder / f"{_fingerprint(rows, model, dtype)}.npy"
    found = _read(path, rows.action_count)
    if found is None:
        found = await _computed(rows, score, status)
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        with partial.open("wb") as file:
            np.save(file, found)
        partial.replace(path)
    return dataclasses.replace(rows, ref_logprobs=found)


async def _computed(
    rows: RowBatch,
    score: Callable[[RowBatch], Awaitable[np.ndarray]],
    status: Callable[[str], None],
) -> np.ndarray:
    found = np.zeros(rows.action_count, np.float32)
    pieces = np.cumsum(rows.row_lengths) // _TOKENS_AT_ONCE
    for piece in np.unique(pieces):
        status(f"log-probs of the reference model: {piece / (pieces[-1] + 1):.0%}")
        chosen = np.flatnonzero(pieces == piece)
        found[rows.action_indices(chosen)] = await score(rows.take(chosen))
    return found


def _read(path: Path, count: int) -> np.ndarray | None:
    try:
        found = np.load(path)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == (count,) and found.dtype == np.float32 else None


def _fingerprint(rows: RowBatch, model: str, dtype: str) -> str:
    digest = hashlib.sha256(f"{model}|{dtype}".encode())
    folder = Path(model)
    for path in sorted(folder.glob("*")) if folder.is_dir() else []:
        if path.suffix in (".safetensors", ".bin", ".json"):
            facts = path.stat()
            digest.update(f"{path.name}|{facts.st_size}|{facts.st_mtime_ns}".encode())
    digest.update(rows.digest.encode())
    return digest.hexdigest()[:24]
