"""Who would run where, and how much memory each would take: an estimate before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.machine import Machine
from rlx.core.models import ModelInfo, stored_weights
from rlx.core.selection import Selection

_MIB = 2**20
_PROCESS = {"driver": 350, "learner": 450, "vllm": 900, "transformers": 450, "rewards": 150}
"""MiB of a process before it holds a model: interpreter, libraries and their buffers.

Import alone took (x86, Linux): torch 220, with transformers and deepspeed 263, vllm 600 MiB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run (one part of the driver under `--runtime inline`)."""

    name: str
    what: str
    cpus: int
    """Threads while its phase is on; phases take turns."""
    memory: int | None
    """Bytes, estimated; None when the model's size isn't known."""
    detail: str
    """How the memory comes about."""


def roles(config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine) -> list[Role]:
    """All processes of a run, in the order in which they start."""
    return [
        Role(
            name="driver",
            what="collects rollouts, computes advantages",
            cpus=1,
            memory=_PROCESS["driver"] * _MIB,
            detail="",
        ),
        *_learners(config, selection, info, machine),
        *_engines(config, info, machine),
        *_reference(config, selection, info, machine),
        *_critic(config, selection, info, machine),
        *_rewards(config, selection, machine),
    ]


def _rewards(config: RunConfig, selection: Selection, machine: Machine) -> Iterator[Role]:
    memory: int | None = _PROCESS["rewards"] * _MIB
    detail = "without what a reward itself loads"
    if selection.loads:
        found = [stored_weights(model, where=key) for key, model in selection.loads]
        sizes_of = [sizes.weight_bytes(n, dtype or "float32") for n, dtype in found if n]
        memory = _PROCESS["learner"] * _MIB + sum(sizes_of)
        detail = f"reward model {sizes.gib(sum(sizes_of))}"
        if len(sizes_of) < len(found):
            memory, detail = None, "a reward model whose size is not known"
    for number in range(config.reward.workers):
        yield Role(
            name=f"rewards-{number}",
            what=", ".join(ref.name for ref, _ in selection.rewards) or "no reward",
            cpus=(config.runtime.cpus or machine.cpus)
            if "reward_model" in selection.requires
            else 1,
            memory=memory,
            detail=detail,
        )


def _learners(
    config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine
) -> Iterator[Role]:
    dtype, stage = sizes.learner_dtype(config, info), sizes.zero_stage(config, info)
    memory, detail = None, f"{dtype}, ZeRO {stage}"
    if config.learner.lora.enabled:
        detail += f", adapters of rank {config.learner.lora.rank}"
        if "ref_logprobs" in selection.requires and config.policy_is_reference:
            detail += " (the reference without them)"
    if info.parameters is not None:
        held = sizes.training_bytes(config, info, info.parameters)
        work = sizes.activation_bytes(config, info)
        memory = held + work + _PROCESS["learner"] * _MIB
        detail += f"; model and optimizer {sizes.gib(held)}, one micro-batch {sizes.gib(work)}"
    for rank in range(config.learner.ranks):
        yield Role(
            name=f"learner-{rank}",
            what=f"trains the policy (rank {rank} of {config.learner.ranks})",
            cpus=_rank_threads(config, selection, machine),
            memory=memory,
            detail=detail,
        )


def _critic(
    config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine
) -> Iterator[Role]:
    if "values" not in selection.requires:
        return
    beside = config.critic.placement == "colocated"
    memory = None
    if info.parameters is not None:  # the head has one output in place of the vocabulary
        held = sizes.training_bytes(config, info, info.parameters)
        work = sizes.activation_bytes(config, replace(info, vocab_size=1))
        memory = held + work + (0 if beside else _PROCESS["learner"] * _MIB)
    for rank in range(config.learner.ranks):
        place = f"in learner-{rank}'s process" if beside else "trains while the policy does"
        yield Role(
            name=f"critic-{rank}",
            what=f"trains values from {config.critic.model or 'the starting weights'}",
            cpus=_rank_threads(config, selection, machine),
            memory=memory,
            detail=f"{place}; wanted by {' and '.join(selection.required_by['values'])}",
        )


def _rank_threads(config: RunConfig, selection: Selection, machine: Machine) -> int:
    """A critic that is apart trains at the same time as the policy, with half of the threads."""
    apart = "values" in selection.requires and config.critic.placement == "apart"
    shares = config.learner.ranks * (2 if apart else 1)
    return max((config.runtime.cpus or machine.cpus) // shares, 1)


def _engines(config: RunConfig, info: ModelInfo, machine: Machine) -> Iterator[Role]:
    rollout, dtype = config.rollout, sizes.engine_dtype(config, info)
    cache = int(rollout.kv_cache_gib * sizes.GIB)
    token = sizes.kv_bytes_per_token(info, dtype)
    sequence = sizes.longest_sequence(config, info.context_length)
    if machine.gpus:
        cache = int(rollout.gpu_memory_utilization * machine.gpus[0].memory)
    if rollout.engine == "transformers" and token is not None:
        cache = min(rollout.max_running, config.batch_size) * sequence * token
    detail = f"{dtype}; KV cache {sizes.gib(cache)}"
    if token is not None and rollout.engine == "vllm":
        detail += f" holds {cache // (token * sequence)} sequences of {sequence} tokens"
    memory = None
    if info.parameters is not None:
        weights = sizes.weight_bytes(info.parameters, dtype)
        memory = weights + cache + _PROCESS[rollout.engine] * _MIB
        detail = f"weights {sizes.gib(weights)}, {detail}"
    for number in range(rollout.engines):
        yield Role(
            name=f"engine-{number}",
            what=f"generates with {rollout.engine}",
            cpus=max((config.runtime.cpus or machine.cpus) // rollout.engines, 1),
            memory=memory,
            detail=detail,
        )


def _reference(
    config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine
) -> Iterator[Role]:
    if "ref_logprobs" not in selection.requires or config.policy_is_reference:
        return
    dtype = sizes.learner_dtype(config, info)
    memory = None
    if info.parameters is not None:
        tokens = max(
            config.learner.token_budget, sizes.longest_sequence(config, info.context_length)
        )
        logits = tokens * (info.vocab_size or 0) * 4
        weights = sizes.weight_bytes(info.parameters, dtype)
        memory = weights + logits + _PROCESS["learner"] * _MIB
    yield Role(
        name="reference",
        what=f"scores with {config.kl.reference or 'the starting weights'}",
        cpus=config.runtime.cpus or machine.cpus,
        memory=memory,
        detail=f"{dtype}; wanted by {' and '.join(selection.required_by['ref_logprobs'])}",
    )
