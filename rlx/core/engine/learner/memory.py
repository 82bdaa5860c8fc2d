"""How much of the vocabulary's width the memory holds at once."""

from __future__ import annotations

import os
from typing import Any

import torch

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.model import Loaded

SHARE = 16
"""Of the memory, one part in so many may be logits."""


def with_known_chunk(
    settings: LearnerConfig, loaded: Loaded[Any], device: torch.device
) -> LearnerConfig:
    """The settings with a number for `logprob_chunk: auto`.

    It follows from what memory there is, not from what is free at the moment: pieces change the
    rounding of a gradient, and a run must repeat.
    """
    if settings.logprob_chunk != "auto":
        return settings
    head = loaded.module.model.get_output_embeddings()
    chunk = 0
    if head is not None:
        row = head.weight.shape[0] * loaded.dtype.itemsize
        chunk = max(1, memory_of(device) // SHARE // row)
    return settings.model_copy(update={"logprob_chunk": chunk})


def memory_of(device: torch.device) -> int:
    """Bytes of the accelerator, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
