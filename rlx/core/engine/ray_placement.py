"""GPUs and nodes of a Ray cluster, reserved for a run before its first worker starts.

Every group of roles is a Ray placement group, so that its bundles are granted together or not at
all. Which GPUs a worker of a bundle sees is set by its `CUDA_VISIBLE_DEVICES` and not by Ray's
`num_gpus`: roles that share GPUs, one of them over several, can't be told apart by fractions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.core.config_placement import PlacementConfig
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.errors import EngineError
from rlx.core.layout import ROLES, Group, Layout, Process, lay_out

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What Ray gave a bundle."""

    node: str
    """Ray's id of the node."""
    address: str
    gpus: tuple[str, ...]
    """As `CUDA_VISIBLE_DEVICES` names them on that node."""
    ports: tuple[int, ...] = ()
    """Free when the bundle was granted; one for each role. Empty where nobody asked."""


class RayPlacement:
    """The reserved bundles of a run.

    Args:
        spots: of each bundle of each group.
        hides: there are GPUs, of which a worker is to see no other than its own.
    """

    def __init__(
        self,
        layout: Layout,
        groups: Sequence[Any],
        spots: Sequence[Sequence[Spot]],
        *,
        hides: bool,
        sleep_level: int,
    ) -> None:
        self._layout = layout
        self._hides = hides
        self._sleeps = bool(sleep_level and layout.sharing("engines"))
        self._groups = list(groups)
        self._spots = spots

    @classmethod
    def reserve(cls, specs: Sequence[WorkerSpec], settings: PlacementConfig) -> RayPlacement:
        """Reserve what the workers need (blocking).

        Raises:
            UsageError: the cluster has too few GPUs.
            EngineError: they were not free in time.
        """
        import ray

        resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        gpus = [int(one.get("GPU", 0)) for one in resources]
        layout = lay_out(wanted(specs), settings, gpus=sum(gpus), node_gpus=max(gpus))
        cpus = {spec.name: spec.cpus for spec in specs}
        groups: list[Any] = []
        try:
            for group in layout.groups:
                bundles = [
                    _bundle(sum(cpus[name] for name in names), group.bundle_gpus)
                    for names in group.processes
                ]
                groups.append(ray.util.placement_group(bundles, strategy=settings.strategy))
            _wait(groups, layout, settings.patience)
            meets = {spec.name for spec in specs if spec.rank == 0 and _meets(spec)}
            spots = [
                _look(made, group, meets, settings.patience)
                for made, group in zip(groups, layout.groups, strict=True)
            ]
            return cls(layout, groups, spots, hides=any(gpus), sleep_level=settings.sleep_level)
        except BaseException:
            _remove(groups)
            raise

    def settle(self, specs: Sequence[WorkerSpec]) -> list[WorkerSpec]:
        """Specs with the GPUs that each may see, and where the ranks of a learner meet."""
        return [self._settled(spec) for spec in specs]

    def _settled(self, spec: WorkerSpec) -> WorkerSpec:
        kwargs = dict(spec.kwargs)
        if _meets(spec) and spec.name in self._layout.seats:
            first = self._spot(spec.name.rpartition("-")[0] + "-0")
            role = sorted(ROLES).index(spec.role)
            kwargs |= {"master_address": first.address, "master_port": first.ports[role]}
        if spec.role == "rollout" and self._sleeps:
            # While the learner trains, an engine that runs ahead generates.
            kwargs["sleeps"] = spec.kwargs["settings"].max_staleness == 0
        if kwargs.get("transport") == "auto":
            kwargs["transport"] = self._transport(spec)
        env = dict(spec.env)
        if self._hides:
            seat = self._layout.seats.get(spec.name)
            own = [self._spot(spec.name).gpus[number] for number in seat.gpus] if seat else []
            env[VISIBLE] = ",".join(own)
        return dataclasses.replace(spec, kwargs=kwargs, env=env)

    def _transport(self, spec: WorkerSpec) -> str:
        """How an engine's weights come: vLLM's ways where GPUs are; else the learner chooses, when
        it knows where everybody is."""
        if not self._layout.gpus or spec.kwargs["settings"].engine != "vllm":
            return "auto"
        return "ipc" if "learner" in self._layout.sharing("engines") else "nccl"

    def options(self, spec: WorkerSpec) -> Mapping[str, Any]:
        """Options of the actor: its bundle, if it has one."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        seat = self._layout.seats.get(spec.name)
        if seat is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=self._groups[seat.group], placement_group_bundle_index=seat.bundle
        )
        return {"scheduling_strategy": strategy}

    def node(self, spec: WorkerSpec) -> str | None:
        """Ray's id of the node that a worker is on; None where Ray chooses."""
        host = spec.beside or spec.name
        return self._spot(host).node if host in self._layout.seats else None

    def _spot(self, name: str) -> Spot:
        seat = self._layout.seats[name]
        return self._spots[seat.group][seat.bundle]

    def release(self) -> None:
        _remove(self._groups)
        self._groups.clear()


def wanted(specs: Sequence[WorkerSpec]) -> list[Process]:
    """The processes behind the specs; who shares another's process has no place of its own."""
    return [
        Process(name=spec.name, role=ROLES.get(spec.role, spec.role), gpus=spec.gpus)
        for spec in specs
        if spec.beside is None
    ]


def _meets(spec: WorkerSpec) -> bool:
    """Whether it is one of several ranks, which have to find one another."""
    return spec.world > 1 and "master_port" in spec.kwargs


def _bundle(cpus: float, gpus: int) -> dict[str, float]:
    # Ray refuses a bundle of nothing.
    return {"CPU": max(cpus, 1.0 if not gpus else 0.0), **({"GPU": float(gpus)} if gpus else {})}


def _wait(groups: Sequence[Any], layout: Layout, patience: float) -> None:
    import ray
    from ray.exceptions import GetTimeoutError

    try:
        ray.get([group.ready() for group in groups], timeout=patience)
    except GetTimeoutError:
        needs = ", ".join(
            f"{group.bundles} × {{{', '.join(f'{k} {v:g}' for k, v in bundle.items())}}} for "
            f"{' + '.join(group.roles)}"
            for group, made in zip(layout.groups, groups, strict=True)
            for bundle in made.bundle_specs[:1]
        )
        free = ray.available_resources()
        raise EngineError(
            f"the cluster had no room within {patience:g} s (placement.patience): the run needs "
            f"{needs}; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
        ) from None


def _look(made: Any, group: Group, meets: set[str], patience: float) -> list[Spot]:
    """Where every bundle is. Which GPUs are its own, and which ports are free where the ranks of a
    learner meet, only a process in the bundle can tell."""
    import ray
    from ray.exceptions import GetTimeoutError
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    look: Any = ray.remote(here)
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    of_bundle = ray.util.placement_group_table(made)["bundles_to_node_id"]
    spots: list[Any] = []
    for number, names in enumerate(group.processes):
        if not group.bundle_gpus and not meets.intersection(names):
            node = of_bundle[number]
            spots.append(ray.put(Spot(node=node, address=nodes[node], gpus=())))
            continue
        strategy = PlacementGroupSchedulingStrategy(
            placement_group=made, placement_group_bundle_index=number
        )
        asked = look.options(num_cpus=0, num_gpus=group.bundle_gpus, scheduling_strategy=strategy)
        spots.append(asked.remote())
    try:
        return ray.get(spots, timeout=patience)
    except GetTimeoutError:
        raise EngineError(
            f"the cluster granted room for {' + '.join(group.roles)}, but no process has started "
            f"there within {patience:g} s (placement.patience): `ray status` and Ray's logs on "
            "those nodes say more"
        ) from None


def here() -> Spot:
    """The bundle that this runs in."""
    import ray

    with contextlib.ExitStack() as servers:
        opened = [servers.enter_context(socket.socket()) for _ in ROLES]
        for server in opened:
            server.bind(("", 0))
        ports = tuple(int(server.getsockname()[1]) for server in opened)
    return Spot(
        node=ray.get_runtime_context().get_node_id(),
        address=ray.util.get_node_ip_address(),
        gpus=tuple(map(str, ray.get_gpu_ids())),
        ports=ports,
    )


def _remove(groups: Sequence[Any]) -> None:
    import ray

    for group in groups:
        if ray.is_initialized():
            ray.util.remove_placement_group(group)
