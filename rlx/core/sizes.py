"""Arithmetic of a run: batches, optimizer steps, bytes of memory and disk."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.core.config import LoraConfig, RunConfig
from rlx.core.config_lora import ALL_LINEAR
from rlx.core.micro_batch import fitting_tokens, token_bytes
from rlx.core.model_layers import ends_with, linear_layers
from rlx.core.models import ModelInfo

KV_BLOCK = 32
"""Tokens per block of the KV cache on a CPU host. vLLM's default of 128 shares no prefix of a short
prompt."""
GIB = 2**30
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ADAM = 8
"""Bytes of the two float32 moments of one parameter."""
_MASTER = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """How many of what one training step handles."""

    tasks: int
    rollouts: int
    new_tokens: int
    """At most, over the batch."""
    sequence_tokens: int
    """Longest sequence: prompt and response."""
    minibatch: int
    """Rollouts per optimizer step."""
    updates: int
    """Optimizer steps per training step."""
    micro_batches: int
    """Per optimizer step and rank, at most (all sequences as long as they can be)."""


def batch_sizes(config: RunConfig, context_length: int, *, token_budget: int) -> BatchSizes:
    """Batch arithmetic for a model with that context length."""
    sequence = longest_sequence(config, context_length)
    minibatch = min(config.learner.minibatch_size or config.batch_size, config.batch_size)
    per_rank = -(-minibatch // config.learner.ranks)
    fitting = max(token_budget // sequence, 1)
    return BatchSizes(
        tasks=config.rollout.groups,
        rollouts=config.batch_size,
        new_tokens=config.batch_size * config.rollout.max_new_tokens,
        sequence_tokens=sequence,
        minibatch=minibatch,
        updates=config.updates_per_step,
        micro_batches=-(-per_rank // fitting),
    )


def longest_sequence(config: RunConfig, context_length: int) -> int:
    """Tokens of the longest rollout that the settings allow."""
    context = min(context_length, config.rollout.context_length or context_length)
    if config.data.max_prompt_tokens is None:
        return context
    response = config.rollout.max_response_tokens or config.rollout.max_new_tokens
    return min(context, config.data.max_prompt_tokens + response)


def learner_dtype(config: RunConfig, info: ModelInfo) -> str:
    """Data type that the policy is trained in."""
    return info.dtype if config.learner.dtype == "auto" else config.learner.dtype


def engine_dtype(config: RunConfig, info: ModelInfo) -> str:
    """Data type that rollouts are made in."""
    chosen = config.rollout.dtype
    return learner_dtype(config, info) if chosen == "auto" else chosen


def weight_bytes(parameters: int, dtype: str) -> int:
    return parameters * _BYTES.get(dtype, 4)


def trained_parameters(lora: LoraConfig, info: ModelInfo, parameters: int) -> int:
    """Numbers that an optimizer moves: all `parameters`, or r · (inputs + outputs) of each adapter.

    Where the model's files are not here, as if its layers were squares of the hidden width.
    """
    if lora.rank is None:
        return parameters
    layers = linear_layers(info)
    if not layers:
        return lora.rank * 2 * (info.hidden_size or 0) * 7 * (info.layers or 0)
    wanted = lora.target_modules
    return sum(
        lora.rank * sum(shape)
        for name, shape in layers.items()
        if wanted == [ALL_LINEAR] or any(ends_with(name, end) for end in wanted)
    )


def training_bytes(config: RunConfig, info: ModelInfo, parameters: int) -> int:
    """Weights, gradients, float32 master copy and Adam moments on *one* rank, ZeRO considered."""
    return sum(training_parts(config, info, parameters).values())


def training_parts(config: RunConfig, info: ModelInfo, parameters: int) -> dict[str, int]:
    """`training_bytes` by what they are for; the master copy counts as the optimizer's."""
    dtype, ranks, lora = learner_dtype(config, info), config.learner.ranks, config.learner.lora
    trained = trained_parameters(lora, info, parameters)
    adapters = trained if lora.enabled else 0
    frozen = parameters // 2 if lora.quantization else weight_bytes(parameters, dtype)
    weights = frozen + weight_bytes(adapters, dtype)
    gradients = weight_bytes(trained, dtype)
    optimizer = trained * (_ADAM + (0 if dtype == "float32" else _MASTER))
    stage = zero_stage(config, info)
    if stage >= 1:
        optimizer //= ranks
    if stage >= 2:
        gradients //= ranks
    if stage >= 3:
        weights //= ranks
    return {"parameters": weights, "gradients": gradients, "optimizer": optimizer}


def zero_stage(config: RunConfig, info: ModelInfo) -> int:
    """The configured ZeRO stage, else 0 for one float32 rank and 1 otherwise."""
    if config.learner.zero_stage is not None:
        return config.learner.zero_stage
    alone = config.learner.ranks == 1 and learner_dtype(config, info) == "float32"
    return 0 if alone else 1


def token_budget(config: RunConfig, info: ModelInfo, *, accelerated: bool) -> int:
    """Most tokens of a micro-batch: `learner.token_budget`, or what `auto` comes to."""
    settings = config.learner
    if settings.token_budget != "auto":
        return settings.token_budget
    each = token_bytes(
        layers=info.layers,
        hidden=info.hidden_size,
        vocabulary=info.vocab_size,
        value=_BYTES.get(learner_dtype(config, info), 4),
        recomputed=settings.gradient_checkpointing,
    )
    return fitting_tokens(each, accelerated=accelerated)


def activation_bytes(config: RunConfig, info: ModelInfo, *, accelerated: bool = False) -> int:
    """Estimate for one micro-batch."""
    return sum(activation_parts(config, info, accelerated=accelerated).values())


def activation_parts(
    config: RunConfig, info: ModelInfo, *, accelerated: bool = False
) -> dict[str, int]:
    """`activation_bytes` by where they arise."""
    budget = token_budget(config, info, accelerated=accelerated)
    tokens = max(budget, longest_sequence(config, info.context_length))
    value = _BYTES.get(learner_dtype(config, info), 4)
    body = token_bytes(
        layers=info.layers,
        hidden=info.hidden_size,
        vocabulary=None,
        value=value,
        recomputed=config.learner.gradient_checkpointing,
    )
    chunk = config.learner.logprob_chunk
    rows = min(tokens, chunk) if chunk != "auto" and chunk else tokens
    head = rows * (info.vocab_size or 0) * value
    return {"activations": tokens * body, "logits": head}


def kv_bytes_per_token(info: ModelInfo, dtype: str) -> int | None:
    """Keys and values of one token over all layers; None when the config doesn't say."""
    if info.layers is None or info.kv_width is None:
        return None
    return 2 * info.layers * info.kv_width * _BYTES.get(dtype, 2)


def kv_gib_of_a_step(
    config: RunConfig,
    info: ModelInfo,
    *,
    dtype: str,
    sequence_tokens: int | None,
    context_length: int,
) -> float | None:
    """KV cache that all rollouts of a training step can fill at once, and at least one of the whole
    context, so that an engine of a CPU host need not keep (and clear) more; None: not known.

    Args:
        sequence_tokens: most tokens of a rollout; None: not known.
    """
    token = kv_bytes_per_token(info, dtype)
    rollout = config.rollout
    if token is None or sequence_tokens is None or rollout.max_staleness or config.evaluates:
        return None
    # A greedy rollout a group beside those that are trained on, where an estimator asks for it.
    sequences = min(rollout.max_running, rollout.groups * (rollout.group_size + 1))
    # Sequences take whole blocks; the engine keeps some for itself.
    tokens = max(sequences * (sequence_tokens + KV_BLOCK), context_length) + 4 * KV_BLOCK
    return tokens * token / GIB


def checkpoint_bytes(
    config: RunConfig, info: ModelInfo, parameters: int, *, critic: bool = False
) -> int:
    """One checkpoint on disk: weights and optimizer to continue from, and a model folder.

    Args:
        critic: whether a critic of the policy's size is trained too.
    """
    dtype = learner_dtype(config, info)
    master = 0 if dtype == "float32" else _MASTER
    trained = trained_parameters(config.learner.lora, info, parameters)
    weights = weight_bytes(trained, dtype)
    return weights + (weights + trained * (_ADAM + master)) * (2 if critic else 1)


def gib(count: float) -> str:
    """Bytes as a person reads them.

    >>> gib(3 * 2**30), gib(5 * 2**20)
    ('3.0 GiB', '5.0 MiB')
    """
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
