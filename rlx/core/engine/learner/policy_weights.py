"""The policy's weights under checkpoint names, as what sends them to engines takes them.

They come block by block (a layer's attention, its feed-forward part, a norm, the embedding), so
that no second copy of the model is made where names and shapes of files are others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from rlx.core.engine.learner.sharded import ShardedModel


class PolicyWeights:
    """A `WeightsSource` over a model in training. All ranks iterate, also those that only gather.

    Args:
        renewed: leave out what is known to be as the model started.
    """

    def __init__(self, policy: ShardedModel, *, renewed: bool = False) -> None:
        self._policy = policy
        self._renewed = renewed

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [
            (name, tensor.dtype, tensor.shape)
            for block in self._blocks(self._policy.described_parameters(renewed=self._renewed))
            for name, tensor in self._checkpoint_names(block)
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for block in self._blocks(self._whole()):
            yield from self._checkpoint_names(block)

    def gather(self) -> None:
        """Take part in another rank's iteration."""
        for _ in self._whole():
            pass

    def _whole(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.whole_parameters(renewed=self._renewed)

    def _blocks(self, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        block: dict[str, Tensor] = {}
        current = None
        for name, tensor in parameters:
            if block and block_of(name) != current:
                yield block
                block = {}
            current = block_of(name)
            # What ZeRO-3 gathered goes away with the next one.
            block[name] = tensor.clone() if self._policy.gathers else tensor
        if block:
            yield block

    def _checkpoint_names(self, block: dict[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """transformers fuses experts, and splits them again in files; engines read the latter."""
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._policy.module.model, block).items()


def block_of(name: str) -> str:
    """The block of a parameter: up to the part of its layer that it belongs to.

    >>> block_of("model.layers.3.self_attn.q_proj.weight")
    'model.layers.3.self_attn'
    >>> block_of("model.layers.3.mlp.experts.7.w1.weight")
    'model.layers.3.mlp'
    >>> block_of("model.embed_tokens.weight")
    'model.embed_tokens'
    """
    parts = name.split(".")
    layer = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    end = len(parts) - 1 if layer is None else min(layer + 2, len(parts) - 1)
    return ".".join(parts[:end])
