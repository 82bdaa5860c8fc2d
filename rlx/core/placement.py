"""Who would run where, and how much memory each would take: an estimate before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.machine import Machine
from rlx.core.models import ModelInfo, stored_weights
from rlx.core.selection import Selection

_MIB = 2**20
PROCESS: Mapping[str, int] = {
    "driver": 350 * _MIB,
    "learner": 450 * _MIB,
    "vllm": 900 * _MIB,
    "transformers": 450 * _MIB,
    "rewards": 150 * _MIB,
}
"""Bytes of a process before it holds a model: interpreter, libraries and their buffers.

Import alone took (x86, Linux): torch 220, with transformers and deepspeed 263, vllm 600 MiB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """One process of a run (one part of the driver under `--runtime inline`)."""

    name: str
    what: str
    cpus: int
    """Threads while its phase is on; phases take turns."""
    parts: Mapping[str, int] | None
    """Bytes of memory by what they are for, on each of its GPUs where it has some; None when the
    model's size isn't known."""
    detail: str = ""
    """How the memory comes about."""
    resident: int = 0
    """Bytes of them that stay while others are at work."""
    process: int = 0
    """Bytes of the process itself, on the host."""

    @property
    def memory(self) -> int | None:
        """Bytes, model and process; None when the model's size isn't known."""
        return None if self.parts is None else sum(self.parts.values()) + self.process


def roles(config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine) -> list[Role]:
    """All processes of a run, in the order in which they start."""
    return [
        Role(
            name="driver",
            what="collects rollouts, computes advantages",
            cpus=1,
            parts={},
            process=PROCESS["driver"],
        ),
        *_learners(config, selection, info, machine),
        *_engines(config, info, machine),
        *_reference(config, selection, info, machine),
        *_critic(config, selection, info, machine),
        *_rewards(config, selection, machine),
    ]


def _rewards(config: RunConfig, selection: Selection, machine: Machine) -> Iterator[Role]:
    parts: dict[str, int] | None = {}
    process, detail = PROCESS["rewards"], "without what a reward itself loads"
    if selection.loads:
        found = [stored_weights(model, where=key) for key, model in selection.loads]
        sizes_of = [sizes.weight_bytes(n, dtype or "float32") for n, dtype in found if n]
        parts = {"parameters": sum(sizes_of)}
        process, detail = PROCESS["learner"], "a reward model"
        if len(sizes_of) < len(found):
            parts, detail = None, "a reward model whose size is not known"
    for number in range(config.reward.workers):
        yield Role(
            name=f"rewards-{number}",
            what=", ".join(ref.name for ref, _ in selection.rewards) or "no reward",
            cpus=(config.runtime.cpus or machine.cpus)
            if "reward_model" in selection.requires
            else 1,
            parts=parts,
            resident=sum((parts or {}).values()),
            process=process,
            detail=detail,
        )


def _trained(
    config: RunConfig, info: ModelInfo, machine: Machine
) -> tuple[dict[str, int] | None, int]:
    """Memory of one rank that trains a model, and what of it stays between its updates."""
    if info.parameters is None:
        return None, 0
    held = sizes.training_parts(config, info, info.parameters)
    parts = sizes.activation_parts(config, info, accelerated=bool(machine.gpus))
    return {**held, **parts}, sum(held.values())


def _learners(
    config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine
) -> Iterator[Role]:
    parts, held = _trained(config, info, machine)
    detail = f"{sizes.learner_dtype(config, info)}, ZeRO {sizes.zero_stage(config, info)}"
    if config.learner.lora.enabled:
        detail += f", adapters of rank {config.learner.lora.rank}"
        if "ref_logprobs" in selection.requires and config.policy_is_reference:
            detail += " (the reference without them)"
    for rank in range(config.learner.ranks):
        yield Role(
            name=f"learner-{rank}",
            what=f"trains the policy (rank {rank} of {config.learner.ranks})",
            cpus=_rank_threads(config, selection, machine),
            parts=parts,
            resident=held,
            process=PROCESS["learner"],
            detail=detail,
        )


def _critic(
    config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine
) -> Iterator[Role]:
    if "values" not in selection.requires:
        return
    beside = config.critic.placement == "colocated"
    # The head has one output in place of the vocabulary.
    parts, held = _trained(config, replace(info, vocab_size=1), machine)
    for rank in range(config.learner.ranks):
        place = f"in learner-{rank}'s process" if beside else "trains while the policy does"
        yield Role(
            name=f"critic-{rank}",
            what=f"trains values from {config.critic.model or 'the starting weights'}",
            cpus=_rank_threads(config, selection, machine),
            parts=parts,
            resident=held,
            process=0 if beside else PROCESS["learner"],
            detail=f"{place}; wanted by {' and '.join(selection.required_by['values'])}",
        )


def _rank_threads(config: RunConfig, selection: Selection, machine: Machine) -> int:
    """A critic that is apart trains at the same time as the policy, with half of the threads."""
    apart = "values" in selection.requires and config.critic.placement == "apart"
    shares = config.learner.ranks * (2 if apart else 1)
    return max((config.runtime.cpus or machine.cpus) // shares, 1)


def _engines(config: RunConfig, info: ModelInfo, machine: Machine) -> Iterator[Role]:
    rollout, dtype = config.rollout, sizes.engine_dtype(config, info)
    token = sizes.kv_bytes_per_token(info, dtype)
    sequence = sizes.longest_sequence(config, info.context_length)
    split = rollout.tensor_parallel if machine.gpus else 1
    weights = None
    if info.parameters is not None:
        weights = sizes.weight_bytes(info.parameters, dtype) // split
    cache = int(rollout.kv_cache_gib * sizes.GIB)
    if machine.gpus:  # vLLM takes its share of the device, and what its weights leave is cache
        share = int(rollout.gpu_memory_utilization * machine.gpus[0].memory)
        cache = max(share - (weights or 0), 0)
    if rollout.engine == "transformers" and token is not None:
        cache = min(rollout.max_running, config.batch_size) * sequence * token
    elif not machine.gpus and token is not None:
        # No larger than what all sequences at once can fill.
        cache = min(cache, rollout.max_running * sequence * token)
    detail = dtype
    if token is not None and rollout.engine == "vllm":
        held = cache * split // (token * sequence)
        detail += f", the cache holds {held:,} sequences of {sequence:,} tokens"
    for number in range(rollout.engines):
        yield Role(
            name=f"engine-{number}",
            what=f"generates with {rollout.engine}" + (f" over {split} GPUs" if split > 1 else ""),
            cpus=max((config.runtime.cpus or machine.cpus) // rollout.engines, 1),
            parts=None if weights is None else {"parameters": weights, "KV cache": cache},
            process=PROCESS[rollout.engine],
            detail=detail,
        )


def _reference(
    config: RunConfig, selection: Selection, info: ModelInfo, machine: Machine
) -> Iterator[Role]:
    if "ref_logprobs" not in selection.requires or config.policy_is_reference:
        return
    dtype = sizes.learner_dtype(config, info)
    parts = None
    if info.parameters is not None:
        budget = sizes.token_budget(config, info, accelerated=bool(machine.gpus))
        tokens = max(budget, sizes.longest_sequence(config, info.context_length))
        logits = tokens * (info.vocab_size or 0) * 4
        parts = {"parameters": sizes.weight_bytes(info.parameters, dtype), "logits": logits}
    yield Role(
        name="reference",
        what=f"scores with {config.kl.reference or 'the starting weights'}",
        cpus=config.runtime.cpus or machine.cpus,
        parts=parts,
        resident=parts["parameters"] if parts else 0,
        process=PROCESS["learner"],
        detail=f"{dtype}; wanted by {' and '.join(selection.required_by['ref_logprobs'])}",
    )
