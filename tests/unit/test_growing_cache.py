"""A cache with room holds what transformers' own holds."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig

from rlx.core.engine.rollout import growing_cache as module
from rlx.core.engine.rollout.growing_cache import GrowingLayer, growing_cache

CONFIG = LlamaConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2)


@pytest.mark.parametrize("more", [1, 3, 256])
@pytest.mark.parametrize("most", [4, 40])
def test_it_holds_what_a_dynamic_cache_holds(
    monkeypatch: pytest.MonkeyPatch, more: int, most: int
) -> None:
    """More tokens than were announced, and rows that leave or are repeated in between."""
    monkeypatch.setattr(module, "_MORE", more)
    torch.manual_seed(0)
    ours, theirs = growing_cache(CONFIG, most), DynamicCache(config=CONFIG)
    rows, kept = 3, {1: [0, 2, 2, 1, 0], 9: [1, 4, 0], 10: [2, 0]}
    for step in range(20):
        if step in kept:
            index = torch.tensor(kept[step])
            for cache in (ours, theirs):
                cache.batch_select_indices(index)
            rows = len(index)
        for layer in range(2):
            new = [torch.randn(rows, 2, 5 if step == 0 else 1, 4) for _ in range(2)]
            found = ours.update(*new, layer)
            for one, other in zip(found, theirs.update(*new, layer), strict=True):
                assert torch.equal(one, other)
        assert ours.get_seq_length() == theirs.get_seq_length() == 5 + step


def test_windows_stay_transformers_own() -> None:
    config = MistralConfig(
        num_hidden_layers=1, hidden_size=8, num_attention_heads=2, sliding_window=4
    )
    layers = growing_cache(config, 16).layers
    assert not any(isinstance(layer, GrowingLayer) for layer in layers)
    assert all(isinstance(layer, GrowingLayer) for layer in growing_cache(CONFIG, 16).layers)
