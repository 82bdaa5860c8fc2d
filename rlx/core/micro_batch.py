"""How many tokens a micro-batch holds where `learner.token_budget` is `auto`.

On an accelerator as many as keep it busy. On a CPU its products are as fast with a thousand tokens
as with four thousand, and what a micro-batch keeps for the backward pass is the largest part of the
learner's memory that could be smaller: as many tokens there as fit into a gibibyte.
"""

from __future__ import annotations

MOST = 4096
LEAST = 512
"""On a CPU; below it the sums of gradients cost more than the memory is worth."""
ROOM = 2**30
"""Bytes of activations of one micro-batch on a CPU."""
PER_LAYER = 25
"""Values of the hidden width that a layer keeps for each token, without fused layers."""


def token_bytes(
    *, layers: int | None, hidden: int | None, vocabulary: int | None, value: int, recomputed: bool
) -> int:
    """Estimate of what a micro-batch keeps for each token: values of the layers, and a row of
    logits, over which their gradient is written.

    Fitted to the learner's peak memory after two steps of 512 and of 4096 tokens (6 layers of width
    512, vocabulary 16384, float32); fused layers keep about half.

    Args:
        layers, hidden, vocabulary: None: not known, counts as none.
        value: bytes of one.
        recomputed: with gradient checkpointing, which keeps one value for each layer, and all of
            the layer at work.
    """
    values = (layers or 0) + PER_LAYER if recomputed else (layers or 0) * PER_LAYER
    return (values * (hidden or 0) + (vocabulary or 0)) * value


def fitting_tokens(each: int, *, accelerated: bool) -> int:
    """Tokens of a micro-batch of which each keeps `each` bytes."""
    if accelerated or not each:
        return MOST
    return min(MOST, max(LEAST, ROOM // each))
