"""Indices into flat arrays that hold sequences one after the other; NumPy only."""

from __future__ import annotations

import numpy as np


def ragged_indices(lengths: np.ndarray, sequences: np.ndarray) -> np.ndarray:
    """Indices on the flat axis of the elements of `sequences`, in that order."""
    starts = np.cumsum(lengths) - lengths
    chosen = lengths[sequences]
    offsets = np.arange(chosen.sum()) - np.repeat(np.cumsum(chosen) - chosen, chosen)
    return np.repeat(starts[sequences], chosen) + offsets
