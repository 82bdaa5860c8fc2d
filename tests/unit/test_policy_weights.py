"""What is published of a model: whole blocks, under the names that checkpoints have."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlx.core.engine.learner.policy_weights import PolicyWeights, block_of


class Policy:
    """Stands in for `ShardedModel`."""

    gathers = False

    def __init__(self, model: Any) -> None:
        self.module = SimpleNamespace(model=model)

    def whole_parameters(self, *, renewed: bool) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.model.named_parameters():
            yield name, parameter.detach()

    def described_parameters(self, *, renewed: bool) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.model.named_parameters():
            yield name, parameter.detach().to("meta")


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=2, **small))


def mixtral() -> Any:
    from transformers import MixtralConfig, MixtralForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 1, "num_local_experts": 3}
    return MixtralForCausalLM(MixtralConfig(vocab_size=20, num_hidden_layers=2, **small, **heads))


@pytest.mark.parametrize("make", [llama, mixtral])
def test_all_weights_come_under_the_names_that_a_checkpoint_has(make: Any, tmp_path: Any) -> None:
    from safetensors.torch import load_file

    model = make()
    source = PolicyWeights(Policy(model))  # type: ignore[arg-type]
    model.save_pretrained(tmp_path)
    expected = load_file(tmp_path / "model.safetensors")
    found = dict(source)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    described = [(name, tensor.dtype, tensor.shape) for name, tensor in source]
    assert source.metadata() == described


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("model.layers.3.self_attn.q_proj.weight", "model.layers.3.self_attn"),
        ("model.layers.3.input_layernorm.weight", "model.layers.3.input_layernorm"),
        ("model.layers.3.mlp.experts.7.w1.weight", "model.layers.3.mlp"),
        ("transformer.h.11.attn.c_attn.bias", "transformer.h.11.attn"),
        ("model.embed_tokens.weight", "model.embed_tokens"),
        ("lm_head.weight", "lm_head"),
        ("blocks.3.weight", "blocks.3"),
    ],
)
def test_a_block_is_a_part_of_a_layer(name: str, block: str) -> None:
    assert block_of(name) == block
