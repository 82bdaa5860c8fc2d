"""Keys and values of a batch in tensors with room, so that a token is written beside the others.

transformers' `DynamicCache` makes new tensors for each token of each layer, and so copies all that
there is. Here a layer has room for as many tokens as its batch may still sample; layers that do
more than hold keys and values (windows, recurrent states) stay transformers' own.

Legend: B rows, K key heads, L tokens, D features of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

_MORE = 256
"""Tokens for which there is room when a layer is made; when it grows, for as many more, or for half
of those that it holds."""


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """One layer's keys and values [B, K, L, D], views of tensors with room behind.

    Args:
        most: tokens that there will be in the end.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most
        self._rooms: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values of further tokens; returns those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        held, stop = self.get_seq_length(), self.get_seq_length() + key_states.shape[-2]
        if not self._rooms or stop > self._rooms[0].shape[-2]:
            self._grow(key_states, value_states, held=held, stop=stop)
        for room, states in zip(self._rooms, (key_states, value_states), strict=True):
            room[:, :, held:stop] = states
        self.keys, self.values = (room[:, :, :stop] for room in self._rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only, room included."""
        if held := self.get_seq_length():
            self._rooms = [room[indices] for room in self._rooms]
            self.keys, self.values = (room[:, :, :held] for room in self._rooms)

    def _grow(self, *states: torch.Tensor, held: int, stop: int) -> None:
        more = max(_MORE, held // 2)
        size = max(stop, min(self._most, stop + more))
        rooms = [one.new_empty(*one.shape[:2], size, one.shape[-1]) for one in states]
        for old, new in zip(self._rooms, rooms, strict=False):
            new[:, :, :held] = old[:, :, :held]
        self._rooms = rooms


def growing_cache(config: Any, most: int) -> DynamicCache:
    """A cache of the model with this configuration, for at most `most` tokens a row."""
    cache = DynamicCache(config=config)
    cache.layers = [
        GrowingLayer(most) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache
