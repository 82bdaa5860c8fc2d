"""Sizes that follow from what memory there is."""

from __future__ import annotations

import os
from typing import Any

import torch

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.model import Loaded
from rlx.core.micro_batch import fitting_tokens, token_bytes

SHARE = 16
"""Of the memory, one part in so many may be logits."""


def with_known_sizes(
    settings: LearnerConfig, loaded: Loaded[Any], device: torch.device
) -> LearnerConfig:
    """The settings with numbers for `token_budget: auto` and `logprob_chunk: auto`.

    They follow from the model and from what memory there is, not from what is free at the moment:
    pieces change the rounding of a gradient, and a run must repeat.
    """
    known = {
        "token_budget": _token_budget(settings, loaded, device),
        "logprob_chunk": _logprob_chunk(settings, loaded, device),
    }
    return settings.model_copy(update=known)


def _token_budget(settings: LearnerConfig, loaded: Loaded[Any], device: torch.device) -> int:
    if settings.token_budget != "auto":
        return settings.token_budget
    config = loaded.module.model.config.get_text_config()
    each = token_bytes(
        layers=getattr(config, "num_hidden_layers", None),
        hidden=getattr(config, "hidden_size", None),
        vocabulary=getattr(config, "vocab_size", None),
        value=loaded.dtype.itemsize,
        recomputed=settings.gradient_checkpointing,
    )
    return fitting_tokens(each, accelerated=device.type != "cpu")


def _logprob_chunk(settings: LearnerConfig, loaded: Loaded[Any], device: torch.device) -> int:
    if settings.logprob_chunk != "auto":
        return settings.logprob_chunk
    head = loaded.module.model.get_output_embeddings()
    chunk = 0
    if head is not None:
        row = head.weight.shape[0] * loaded.dtype.itemsize
        chunk = max(1, memory_of(device) // SHARE // row)
    return chunk


def memory_of(device: torch.device) -> int:
    """Bytes of the accelerator, or of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
