"""A small model with random weights, and helpers to drive rollout engines from plain tests."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlx.core.config import RolloutConfig
from rlx.core.engine.interfaces import (
    GenerateRequest,
    Generation,
    PublishReport,
    Sampling,
    SentWeights,
)
from rlx.core.engine.rollout.async_engine import AsyncEngine
from rlx.core.engine.rollout.transformers_engine import TransformersEngine
from rlx.core.engine.rollout.vllm_engine import VllmEngine
from rlx.core.engine.transfer.sender import Sender

ENGINES = {"vllm": VllmEngine, "transformers": TransformersEngine}
CONTEXT = 256
END, VOCABULARY = 1, 96


def make_model(folder: Path) -> Path:
    """A two-layer Llama with tied embeddings, whose distributions are neither flat nor certain."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=END,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def make_mixture(folder: Path) -> Path:
    """A mixture of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=4,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=END,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class ModelSource:
    """A `WeightsSource` over plain tensors."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def metadata(self) -> list[tuple[str, torch.dtype, torch.Size]]:
        return [(name, tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.tensors.items())


def weights_of(model: Any) -> ModelSource:
    return ModelSource({name: value.detach() for name, value in model.named_parameters()})


def make_sender(transport: str = "auto", *, receivers: int = 1, bucket: int = 1 << 14) -> Sender:
    """Buckets of 16 KiB: the smallest model has several."""
    return Sender(transport=transport, receivers=receivers, bucket=bucket)


async def publish(
    source: ModelSource,
    version: int,
    *engines: Any,
    sender: Sender | None = None,
    base: int | None = None,
) -> tuple[SentWeights, list[PublishReport]]:
    """Send weights to engines as a publisher does."""
    sender = sender or make_sender(receivers=len(engines))
    update = sender.offer(version, base)
    sending = asyncio.create_task(asyncio.to_thread(sender.send, source, version))
    try:
        reports = await asyncio.gather(*(engine.load_weights(update) for engine in engines))
    except BaseException:
        sender.abort()
        await asyncio.wait([sending])
        sending.exception()
        raise
    return await sending, list(reports)


def load_weights(engine: Any, model: Any, version: int, **options: Any) -> SentWeights:
    """Publish a model's weights to one engine."""
    return asyncio.run(publish(weights_of(model), version, engine, **options))[0]


def perturbed(folder: Path, *, seed: int = 1) -> Any:
    """The model with every weight moved, the tied embedding included."""
    model = load(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


def settings(**changes: Any) -> RolloutConfig:
    return RolloutConfig.model_validate({"max_running": 64, "kv_cache_gib": 0.25, **changes})


def make_engine(kind: str, model: Path, **changes: Any) -> AsyncEngine:
    engine = ENGINES[kind](
        model=str(model),
        settings=settings(**changes),
        context_length=CONTEXT,
        dtype="float32",
        seed=0,
        threads=1,
    )
    engine.start()
    return engine


def prompts(count: int, *, shortest: int = 3, longest: int = 80) -> list[list[int]]:
    generator = np.random.default_rng(0)
    lengths = generator.integers(shortest, longest, count)
    return [generator.integers(2, VOCABULARY, length).tolist() for length in lengths]


def requests(
    texts: Sequence[Sequence[int]], *, new: int = 16, **sampling: Any
) -> list[GenerateRequest]:
    return [
        GenerateRequest(
            id=index,
            prompt=prompt,
            sampling=Sampling(max_new_tokens=new, **sampling),
            seed=1000 + index,
        )
        for index, prompt in enumerate(texts)
    ]


async def collect(engine: AsyncEngine, wanted: Sequence[GenerateRequest]) -> list[Generation]:
    """All generations of one call, in the order of the requests."""
    found: dict[int, Generation] = {}
    async for batch in engine.generate(wanted):
        for generation in batch:
            assert generation.request_id not in found
            found[generation.request_id] = generation
    return [found[request.id] for request in wanted]


def generate(engine: AsyncEngine, wanted: Sequence[GenerateRequest]) -> list[Generation]:
    return asyncio.run(collect(engine, wanted))


@asynccontextmanager
async def held_at(engine: AsyncEngine, step: int) -> AsyncIterator[None]:
    """Run the body while the engine stands still before its `step`-th step from now.

    Commands that the body submits (not awaits) are executed before the step after it.
    """
    core, reached, release = engine._core, threading.Event(), threading.Event()
    original, count = core.step, itertools.count(1)

    def counted() -> Any:
        if next(count) == step:
            reached.set()
            assert release.wait(30)
        return original()

    core.step = counted  # type: ignore[method-assign]
    try:
        assert await asyncio.to_thread(reached.wait, 30)
        yield
    finally:
        release.set()
        core.step = original  # type: ignore[method-assign]


@torch.no_grad()
def reference_logits(model: Any, prompt: Sequence[int], tokens: np.ndarray) -> torch.Tensor:
    """Logits [n, V] that a plain forward pass gives at the sampled positions."""
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    return model(ids).logits[0, len(prompt) - 1 : -1]


def logprob_error(
    model: Any,
    wanted: Sequence[GenerateRequest],
    generations: Sequence[Generation],
    *,
    temperature: float = 1.0,
) -> float:
    """Largest difference between reported log-probs and those of a plain forward pass."""
    errors = []
    for request, generation in zip(wanted, generations, strict=True):
        logits = reference_logits(model, request.prompt, generation.tokens) / temperature
        index = torch.tensor(generation.tokens, dtype=torch.int64)[:, None]
        expected = logits.log_softmax(-1).gather(1, index)[:, 0].numpy()
        errors.append(np.abs(expected - generation.logprobs).max())
    return float(max(errors))
