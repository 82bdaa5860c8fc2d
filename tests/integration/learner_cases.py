"""A tiny model, batches and learners for the learner's tests."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlx.core.config import LearnerConfig
from rlx.core.engine.batches import take
from rlx.core.engine.interfaces import PublicationPlan, SentWeights, WeightsUpdate
from rlx.core.engine.learner.learner import PolicyLearner
from rlx.core.engine.transfer.receiver import Receiver
from rlx.core.objective import ObjectiveSettings
from rlx.core.references import ComponentRef
from rlx.core.rollouts import TrainBatch

VOCABULARY = 64
PPO = ComponentRef(kind="losses", name="ppo", target="rlx.plugins.losses.ppo:ppo")
TIS = ComponentRef(kind="corrections", name="tis", target="rlx.plugins.corrections.tis:tis")


def write_model(folder: Path, *, dtype: str = "float32", seed: int = 0) -> str:
    """A random Llama with hidden size 64, 2 layers and tied embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        # Large weights make attention sharp, so that a token of a foreign sequence shows.
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return str(folder)


def random_batch(seed: int = 0, *, count: int = 14, old: bool = True) -> TrainBatch:
    """Rollouts of prompts, actions and (every third) an observation between two action spans."""
    rng = np.random.default_rng(seed)
    tokens, positions = [], []
    for index in range(count):
        prompt, actions = int(rng.integers(2, 9)), int(rng.integers(1, 20))
        sampled = [False] * prompt + [True] * actions
        if index % 3 == 0:
            sampled += [False] * 4 + [True] * 5
        tokens.append(rng.integers(3, VOCABULARY, len(sampled)))
        positions.append(np.flatnonzero(sampled))
    return batch_of(rng, tokens, positions, group=np.arange(count) // 2, old=old, engine_noise=0.1)


def batch_of(
    rng: np.random.Generator,
    tokens: list[np.ndarray],
    positions: list[np.ndarray],
    *,
    group: np.ndarray,
    segments: np.ndarray | None = None,
    old: bool = True,
    engine_noise: float = 0.0,
) -> TrainBatch:
    """Sequences with random numbers per action token and rollout.

    Args:
        tokens: of each sequence.
        positions: of its action tokens.
        group: [B] of each rollout.
        segments: [B] sequences of each rollout; None: one.
        old: whether it has the learner's log-probs from before the update.
        engine_noise: standard deviation of the engine's log-probs around those.
    """
    n, count = sum(len(one) for one in positions), len(group)
    logprobs = -np.abs(rng.normal(3.0, 1.0, n)).astype(np.float32)
    noise = rng.normal(0, engine_noise, n) if engine_noise else np.zeros(n)
    return TrainBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.array([len(row) for row in tokens], np.int64),
        action_lengths=np.array([len(row) for row in positions], np.int64),
        action_positions=np.concatenate(positions).astype(np.int64),
        turn=np.zeros(n, np.int64),
        group=group,
        rollout_logprobs=logprobs + noise.astype(np.float32),
        rewards=rng.normal(size=count),
        token_rewards=np.zeros(n),
        segments=segments,
        advantages=rng.normal(size=n).astype(np.float32),
        old_logprobs=logprobs if old else None,
        ref_logprobs=logprobs + rng.normal(0, 0.1, n).astype(np.float32),
    )


def learner_arguments(model: str, **changes: Any) -> dict[str, Any]:
    """Constructor arguments of a `PolicyLearner`; `changes` may also be fields of its settings."""
    settings = {
        "lr": 1e-2,
        "row_tokens": 64,
        "token_budget": 4096,
        "dtype": "float32",
        **{key: changes.pop(key) for key in list(changes) if key in LearnerConfig.model_fields},
    }
    arguments = {
        "model": model,
        "settings": LearnerConfig(**settings),
        "objective": ObjectiveSettings(
            aggregation="token-mean", kl_coef=0.05, entropy_coef=0.01, sequence_norm=32
        ),
        "loss": PPO,
        "correction": TIS,
        "temperature": 0.8,
        "total_updates": 10,
        "rank": 0,
        "world": 1,
        "master_port": 0,
        "threads": 1,
        "seed": 0,
    }
    return {**arguments, **changes}


def started(model: str, **changes: Any) -> PolicyLearner:
    learner = PolicyLearner(**learner_arguments(model, **changes))
    learner.start()
    return learner


def save(learner: Any, folder: Path | str, *, copy: bool = False) -> None:
    """Write a learner's part of a checkpoint."""
    learner.hold(copy=copy, export=False)
    asyncio.run(learner.write_held(str(folder), None))


def saved_state(folder: Path) -> dict[str, np.ndarray]:
    """By `<parameter>/<kind>`: the numbers of a checkpoint, put together from all shards."""
    from safetensors.torch import load_file

    pieces: dict[str, list[tuple[int, np.ndarray]]] = {}
    for shard in folder.glob("shard-*.safetensors"):
        for key, value in load_file(shard).items():
            name, start, kind = key.rsplit("/", 2)
            if kind != "steps":
                pieces.setdefault(f"{name}/{kind}", []).append((int(start), value.numpy()))
    return {
        name: np.concatenate([values for _, values in sorted(found, key=lambda one: one[0])])
        for name, found in pieces.items()
    }


def read_weights(learner: PolicyLearner) -> dict[str, np.ndarray]:
    """Copies of the whole weights, float32."""
    from rlx.core.engine.learner.policy_weights import PolicyWeights

    weights = PolicyWeights(learner._training.model)
    return {name: value.float().cpu().numpy().copy() for name, value in weights}


def sent_by(
    learner: PolicyLearner, version: int, *, base: int | None = None
) -> tuple[SentWeights | None, dict[str, torch.Tensor]]:
    """What a learner sends, and what arrives (at rank 0)."""
    plan = PublicationPlan(
        version=version, base=base, transport="auto", receivers=1, bucket=1 << 14
    )
    update = learner.offer_weights(plan)
    arrived: dict[str, torch.Tensor] = {}

    def receive(update: WeightsUpdate) -> None:
        for tensors in Receiver(update.link).buckets(update.number, complete=False):
            arrived.update({name: tensor.clone() for name, tensor in tensors.items()})

    with ThreadPoolExecutor(1) as thread:
        received = thread.submit(receive, update) if update else None
        sent = learner.send_weights()
        if received:
            received.result()
    return sent, arrived


def publish_learner(learner: PolicyLearner, engine: Any, version: int) -> SentWeights:
    """Have a learner of one rank send its weights to an engine, as a publisher does."""
    plan = PublicationPlan(
        version=version, base=None, transport="auto", receivers=1, bucket=1 << 14
    )

    async def run() -> SentWeights:
        update = learner.offer_weights(plan)
        assert update is not None
        sent, report = await asyncio.gather(
            asyncio.to_thread(learner.send_weights), engine.load_weights(update)
        )
        assert sent is not None
        assert report.checksum == sent.checksum
        return sent

    return asyncio.run(run())


def changed_by(learner: PolicyLearner, batches: list[TrainBatch]) -> dict[str, np.ndarray]:
    """What an update adds to each weight."""
    before = read_weights(learner)
    assert learner.update(batches, step=0) is not None
    after = read_weights(learner)
    return {name: after[name] - before[name] for name in before}


def relative_difference(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """Norm of the difference of two updates, relative to the norm of the update."""
    assert ours.keys() == theirs.keys()
    squares = [
        (float(((ours[name] - theirs[name]) ** 2).sum()), float((theirs[name] ** 2).sum()))
        for name in ours
    ]
    difference, size = np.sum(squares, 0)
    assert size > 0
    return float(np.sqrt(difference / size))


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def permuted(batch: TrainBatch, seed: int) -> TrainBatch:
    return take(batch, np.random.default_rng(seed).permutation(batch.sequence_count))


def without_old_logprobs(batch: TrainBatch) -> TrainBatch:
    return dataclasses.replace(batch, old_logprobs=None)
