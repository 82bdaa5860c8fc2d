"""What would make a run fit that doesn't: changes of its settings, tried on the estimate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from itertools import combinations
from typing import Any, TypeAlias

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.errors import UsageError
from rlx.core.layout import Layout, lay_out, processes
from rlx.core.machine import Machine
from rlx.core.memory import Load, loads
from rlx.core.models import ModelInfo
from rlx.core.placement import roles
from rlx.core.selection import Selection

Change: TypeAlias = Mapping[str, Any]
_MOST_AT_ONCE = 3
_SHOWN = 4


def judge(
    config: RunConfig,
    selection: Selection,
    info: ModelInfo,
    machine: Machine,
    *,
    node_gpus: int,
) -> tuple[Layout, list[Load]]:
    """Where everything would be, and what every GPU, or the machine, would hold.

    Raises:
        UsageError: there are not enough GPUs.
    """
    layout = lay_out(
        processes(config, selection),
        config.placement,
        gpus=len(machine.gpus),
        node_gpus=min(node_gpus, len(machine.gpus)),
    )
    return layout, loads(config, roles(config, selection, info, machine), layout, machine)


def remedies(
    config: RunConfig,
    selection: Selection,
    info: ModelInfo,
    machine: Machine,
    *,
    node_gpus: int,
) -> list[str]:
    """Settings with which the run would fit, fewest changes first, as `--set` takes them."""

    def fits(changed: RunConfig, on: Machine = machine) -> bool:
        try:
            _, found = judge(changed, selection, info, on, node_gpus=node_gpus)
        except UsageError:
            return False
        return all(load.fits for load in found)

    changes = list(_changes(config, info, machine))
    for count in range(1, _MOST_AT_ONCE + 1):
        found = [
            " ".join(f"{key}={_text(value)}" for key, value in merged.items())
            for chosen in combinations(changes, count)
            if (merged := _merged(chosen)) is not None and fits(_with(config, merged))
        ]
        if found:
            return found[:_SHOWN]
    return list(_more_gpus(config, machine, fits))


def _changes(config: RunConfig, info: ModelInfo, machine: Machine) -> Iterator[Change]:
    """Single changes that save memory, those that cost least time first."""
    learner, rollout = config.learner, config.rollout
    if learner.logprob_chunk in ("auto", 0):
        yield {"learner.logprob_chunk": 1024}
    if not learner.gradient_checkpointing:
        yield {"learner.gradient_checkpointing": True}
    budget = sizes.token_budget(config, info, accelerated=bool(machine.gpus))
    while budget // 2 >= max(sizes.longest_sequence(config, info.context_length), 16):
        budget //= 2
        yield {"learner.token_budget": budget}
    if not machine.gpus and rollout.kv_cache_gib > 0.25:
        yield {"rollout.kv_cache_gib": 0.25}
    if not machine.gpus:
        return
    ranks = learner.ranks
    while ranks <= len(machine.gpus) and ranks <= config.batch_size:
        for stage in (1, 2, 3):
            if (ranks, stage) != (learner.ranks, learner.zero_stage) and ranks > 1:
                own = {"learner.ranks": ranks} if ranks != learner.ranks else {}
                yield {**own, "learner.zero_stage": stage}
        ranks *= 2
    width = rollout.tensor_parallel * 2
    while width <= len(machine.gpus) and rollout.engine == "vllm":
        yield {"rollout.tensor_parallel": width}
        width *= 2
    if config.placement.colocate != "all":
        yield {"placement.colocate": "all"}
    for share in (0.9, 0.8, 0.4, 0.3, 0.2):
        if share != rollout.gpu_memory_utilization:
            yield {"rollout.gpu_memory_utilization": share}


def _merged(chosen: tuple[Change, ...]) -> Change | None:
    """The changes together; None where two set the same."""
    merged: dict[str, Any] = {}
    for change in chosen:
        if merged.keys() & change.keys():
            return None
        merged |= change
    return merged


def _with(config: RunConfig, change: Change) -> RunConfig:
    sections: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    parts = {
        section: getattr(config, section).model_copy(update=values)
        for section, values in sections.items()
    }
    return config.model_copy(update=parts)


def _more_gpus(
    config: RunConfig, machine: Machine, fits: Callable[[RunConfig, Machine], bool]
) -> Iterator[str]:
    """The smallest number of the same GPUs, sharded over all of them, that would do."""
    if not machine.gpus:
        return
    count = len(machine.gpus) * 2
    while count <= 4096:
        more = dataclasses.replace(machine, gpus=machine.gpus[:1] * count)
        ranks = min(count // 2, config.batch_size)
        change: dict[str, Any] = {
            "learner.ranks": ranks,
            "learner.zero_stage": 3,
            "learner.gradient_checkpointing": True,
            "learner.logprob_chunk": 1024,
            "placement.colocate": "none",
            "rollout.gpu_memory_utilization": 0.9,
        }
        for width in (1, 2, 4, 8):
            wider = {**change, "rollout.tensor_parallel": width}
            if fits(_with(config, wider), more):
                settings = " ".join(f"{key}={_text(value)}" for key, value in wider.items())
                yield f"{count} such GPUs with {settings}"
                return
        count *= 2


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value}"
