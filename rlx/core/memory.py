"""Whether a run fits: what every GPU holds in each phase, or what a machine without GPUs does.

A GPU's load is the greatest over the phases. While rollouts are made, its engine has its whole
share and trainers keep what they hold between updates. While a model is scored or trained it has
its whole memory, the other trainers theirs if they train at the same time, and an engine what it
has not given up by sleeping. Roles of one process, or of one GPU, never score at the same time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.layout import Layout
from rlx.core.machine import Machine
from rlx.core.placement import Role

CONTEXT = sizes.GIB
"""Bytes that CUDA, NCCL and kernels take on a GPU for each process, by experience; not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one GPU, or the machine, has to hold at most."""

    where: str
    roles: tuple[str, ...]
    phase: str
    """The one in which it holds most."""
    bytes: int
    limit: int

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit


def loads(
    config: RunConfig, placed: Sequence[Role], layout: Layout, machine: Machine
) -> list[Load]:
    """The load of every group's fullest GPU; without GPUs that of the machine.

    Roles whose model's size isn't known count as nothing.
    """
    if not layout.gpus:
        total = sum(role.memory or 0 for role in placed)
        names = tuple(role.name for role in placed)
        return [
            Load(where="this machine", roles=names, phase="run", bytes=total, limit=machine.memory)
        ]
    return [
        max(_of_group(config, placed, layout, number, machine), key=lambda one: one.bytes)
        for number in range(len(layout.groups))
    ]


def _of_group(
    config: RunConfig, placed: Sequence[Role], layout: Layout, number: int, machine: Machine
) -> Iterator[Load]:
    by_name = {role.name: role for role in placed}
    group = layout.groups[number]
    for names in group.processes:
        for gpu in range(group.bundle_gpus):
            hosts = [name for name in names if gpu in layout.seats[name].gpus]
            here = [role for name in hosts for role in _of_process(by_name, name)]
            if here:
                phase, peak = _peak(config, here, layout)
                yield Load(
                    where=f"each GPU of {' + '.join(group.roles)}"
                    if group.gpus > 1
                    else f"the GPU of {' + '.join(group.roles)}",
                    roles=tuple(role.name for role in here),
                    phase=phase,
                    bytes=peak + CONTEXT * len(hosts),
                    limit=machine.gpus[0].memory,
                )


def _of_process(by_name: dict[str, Role], name: str) -> list[Role]:
    """The role of a process, and the critic that lives in a learner's."""
    guests = []
    if name.startswith("learner-") and (critic := by_name.get(f"critic-{name[8:]}")):
        guests = [critic] if not critic.process else []
    return [by_name[name], *guests]


def _peak(config: RunConfig, here: Sequence[Role], layout: Layout) -> tuple[str, int]:
    """Phase and bytes of the fullest moment of one GPU."""
    engines = sum(_bytes(role) for role in here if role.name.startswith("engine-"))
    others = [role for role in here if not role.name.startswith("engine-")]
    resident = sum(role.resident for role in others)
    sleeps = bool(config.placement.sleep_level) and bool(layout.sharing("engines"))
    ahead = config.rollout.max_staleness > 0
    beside = 0 if sleeps and not ahead else engines
    phases = {"rollout": engines + resident} if engines else {}
    working = {role.name.rstrip("0123456789-"): _bytes(role) - role.resident for role in others}
    trainers = [name for name in working if name in ("learner", "critic")]
    if len(trainers) == 2 and config.critic.placement == "apart":
        working["update"] = sum(working.pop(name) for name in trainers)
    for name, more in working.items():
        label = {"learner": "update", "critic": "critic's update"}.get(name, name)
        phases[label] = resident + more + beside
    return max(phases.items(), key=lambda item: item[1])


def _bytes(role: Role) -> int:
    return sum((role.parts or {}).values())
