"""Groups of rollouts with a prompt in common, and tiny models of several architectures."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_cases import VOCABULARY, batch_of

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.memory import with_known_sizes
from rlx.core.engine.learner.model import load_policy
from rlx.core.engine.learner.planning import make_plan
from rlx.core.engine.learner.sharded import on_device
from rlx.core.rollouts import TrainBatch

TOLERANCE = 1e-5
CPU = torch.device("cpu")
PLAIN = {"attention": "sdpa", "shared_prefix": "off", "fused": "off"}
"""A learner that computes as transformers does."""
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large weights make attention sharp, so that a token that must not be read shows.
    "initializer_range": 0.2,
}


def write_architecture(folder: Path, name: str) -> str:
    """A random model; its folder."""
    import transformers

    configs: dict[str, Any] = {
        "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
        "qwen2": lambda: transformers.Qwen2Config(**SIZES),
        "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=12),
        "gpt2": lambda: transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=48, n_layer=2, n_head=4, initializer_range=0.2
        ),
        "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=12, sliding_window=8),
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(configs[name]())
    model.save_pretrained(folder / name)
    return str(folder / name)


def grouped_batch(seed: int, *, groups: int = 4) -> TrainBatch:
    """Groups of 1 to 5 rollouts over prompts of 1 to 20 tokens; some have observations, some have a
    second segment with a prompt of its own."""
    rng = np.random.default_rng(seed)
    tokens, positions, group, segments = [], [], [], []

    def sequence(prompt: np.ndarray) -> None:
        sampled = [False] * len(prompt) + [True] * int(rng.integers(1, 12))
        if rng.random() < 0.3:
            sampled += [False] * 3 + [True] * 4
        more = rng.integers(3, VOCABULARY, len(sampled) - len(prompt))
        tokens.append(np.concatenate([prompt, more]))
        positions.append(np.flatnonzero(sampled))

    for number in range(groups):
        first, second = (rng.integers(3, VOCABULARY, rng.integers(1, 21)) for _ in range(2))
        for _ in range(int(rng.integers(1, 6))):
            sequence(first)
            segments.append(1 + int(rng.random() < 0.3))
            if segments[-1] == 2:
                sequence(second)
            group.append(number)
    return batch_of(
        rng,
        tokens,
        positions,
        group=np.array(group, np.int64),
        segments=np.array(segments, np.int64),
    )


def without_segments(batch: TrainBatch) -> TrainBatch:
    """Each sequence a rollout of its own."""
    assert batch.segments is not None
    return dataclasses.replace(
        batch,
        segments=None,
        group=np.repeat(batch.group, batch.segments),
        rewards=np.repeat(batch.rewards, batch.segments),
    )


def passes(
    model: str, batch: TrainBatch, *, entropy_gradient: bool = True, **changes: Any
) -> tuple[dict[str, np.ndarray], int]:
    """Log-probs, entropies and the gradients of a random function of them; tokens computed.

    Args:
        entropy_gradient: false leaves the entropies out of the function.
    """
    settings = LearnerConfig(**{"dtype": "float32", **changes})
    loaded = load_policy(model, settings, 0.8, CPU)
    settings = with_known_sizes(settings, loaded, CPU)
    plan = make_plan(batch, settings, packing=loaded.packing, alone=True)
    rng = np.random.default_rng(1)
    weights = torch.from_numpy(rng.normal(size=(2, batch.action_count)).astype(np.float32))
    found = {name: np.zeros(batch.action_count) for name in ("logprobs", "entropies")}
    for micro, chunks in zip(plan.micro_batches, plan.chunks, strict=True):
        answers = loaded.module(
            *on_device(micro, CPU),
            layout=micro.layout,
            chunks=chunks,
            entropy_gradient=entropy_gradient,
        )
        for values, answer in zip(found.values(), answers, strict=True):
            values[micro.actions] = answer.detach().numpy()
        sum(
            (answer * weight[micro.actions]).sum()
            for answer, weight in zip(answers, weights, strict=True)
            if answer.requires_grad
        ).backward()
    for name, parameter in loaded.module.named_parameters():
        found[name] = parameter.grad.float().numpy()
    return found, sum(micro.tokens.size for micro in plan.micro_batches)


def assert_same(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> None:
    """Each within the tolerance of its norm."""
    assert ours.keys() == theirs.keys()
    size = max(float(np.linalg.norm(value)) for value in theirs.values())
    for name, value in theirs.items():
        error = float(np.linalg.norm(ours[name] - value))
        # Of biases that nothing depends on (a key's), the gradient is rounding alone.
        assert error <= TOLERANCE * max(float(np.linalg.norm(value)), 1e-2 * size), name
