"""Which process gets which GPUs: groups of roles, bundles of a node's GPUs, seats in them.

A group is one or several roles on the same GPUs. It is made of equal bundles, each of which lies on
one node: of one GPU, or of as many as an engine splits its model over. Processes of one role never
share a GPU; those of different roles in a group do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlx.core.config import PlacementConfig, RunConfig
from rlx.core.errors import UsageError
from rlx.core.selection import Selection

ROLES: Mapping[str, str] = {
    "learner": "learner",
    "critic": "critic",
    "scorer": "reference",
    "reward": "rewards",
    "rollout": "engines",
}
"""Role of a worker → what `placement.colocate` calls it."""
_KNOWN = {
    "actor_ref": [["learner", "reference"]],
    "critic_reward": [["critic", "rewards"]],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process that wants a place."""

    name: str
    role: str
    """As `placement.colocate` names it."""
    gpus: int
    """GPUs that it works on where there are any, on one node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Where one process sits."""

    group: int
    bundle: int
    gpus: tuple[int, ...]
    """Numbers of its GPUs among the bundle's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Roles on the same GPUs."""

    roles: tuple[str, ...]
    bundles: int
    bundle_gpus: int
    """0 where there are no GPUs."""
    processes: tuple[tuple[str, ...], ...]
    """Names, by bundle."""

    @property
    def gpus(self) -> int:
        return self.bundles * self.bundle_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The seats of a run."""

    groups: tuple[Group, ...]
    seats: Mapping[str, Seat]
    """By process."""

    @property
    def gpus(self) -> int:
        return sum(group.gpus for group in self.groups)

    def sharing(self, role: str) -> tuple[str, ...]:
        """The other roles on the GPUs of `role`."""
        for group in self.groups:
            if role in group.roles and group.bundle_gpus:
                return tuple(other for other in group.roles if other != role)
        return ()


def processes(config: RunConfig, selection: Selection) -> list[Process]:
    """The processes of a training run, in the order in which they are seated."""
    ranks, rollout = config.learner.ranks, config.rollout
    requires = selection.requires
    found = [Process(name=f"learner-{rank}", role="learner", gpus=1) for rank in range(ranks)]
    if config.replay is None:
        found += [
            Process(name=f"engine-{number}", role="engines", gpus=rollout.tensor_parallel)
            for number in range(rollout.engines)
        ]
    if "ref_logprobs" in requires and not config.policy_is_reference:
        found.append(Process(name="reference", role="reference", gpus=1))
    if "values" in requires and config.critic.placement == "apart":
        found += [Process(name=f"critic-{rank}", role="critic", gpus=1) for rank in range(ranks)]
    if "reward_model" in requires and config.replay is None:
        found += [
            Process(name=f"rewards-{number}", role="rewards", gpus=1)
            for number in range(config.reward.workers)
        ]
    return found


def lay_out(
    wanted: Iterable[Process], placement: PlacementConfig, *, gpus: int, node_gpus: int
) -> Layout:
    """Seat every process that works on GPUs; without GPUs, spread them over bundles of CPUs.

    Args:
        gpus: of all nodes; 0 for none.
        node_gpus: of the node that has most.

    Raises:
        UsageError: there are not enough GPUs, in all or on one node.
    """
    if placement.gpus is not None:
        gpus = min(gpus, placement.gpus)
    wanted = [one for one in wanted if one.gpus]
    if not gpus:
        return _layout(wanted, _split(wanted, placement, "none"), with_gpus=False)
    chosen = "none" if placement.colocate == "auto" else placement.colocate
    found = _layout(wanted, _split(wanted, placement, chosen), with_gpus=True)
    if found.gpus > gpus and placement.colocate == "auto":
        found = _layout(wanted, _split(wanted, placement, "all"), with_gpus=True)
    if found.gpus > gpus:
        raise _too_few(wanted, found, placement, gpus)
    widest = max((group.bundle_gpus for group in found.groups), default=0)
    if widest > node_gpus:
        raise UsageError(
            f"an engine over {widest} GPUs has to lie on one node, and no node has more than "
            f"{node_gpus}",
            where="rollout.tensor_parallel",
            fix=f"`--set rollout.tensor_parallel={node_gpus}`, and more engines",
        )
    return found


def _split(
    processes: Sequence[Process], placement: PlacementConfig, how: str | Sequence[Sequence[str]]
) -> list[list[str]]:
    """Groups of the roles that there are; a role in no group is one of its own."""
    present = list(dict.fromkeys(one.role for one in processes))
    if how == "all":
        return [present] if present else []
    given = _KNOWN.get(how, []) if isinstance(how, str) else how
    twice = [role for role in present if sum(role in group for group in given) > 1]
    if twice:
        raise UsageError(
            f"{twice[0]} is in two groups",
            where="placement.colocate",
            fix="one group for each role",
        )
    groups = [[role for role in group if role in present] for group in given]
    grouped = {role for group in groups for role in group}
    alone = [[role] for role in present if role not in grouped]
    together = [group for group in groups if group]
    return sorted([*together, *alone], key=lambda group: present.index(group[0]))


def _layout(
    processes: Sequence[Process], groups: Sequence[Sequence[str]], *, with_gpus: bool
) -> Layout:
    made: list[Group] = []
    seats: dict[str, Seat] = {}
    for number, roles in enumerate(groups):
        members = [one for one in processes if one.role in roles]
        unit = max(one.gpus for one in members) if with_gpus else 1
        bundles: list[list[str]] = []
        for role in roles:
            place = 0  # first free GPU of the group for this role
            for one in (one for one in members if one.role == role):
                width = one.gpus if with_gpus else 1
                if place % unit + width > unit:
                    place += unit - place % unit
                bundle, first = divmod(place, unit)
                while len(bundles) <= bundle:
                    bundles.append([])
                bundles[bundle].append(one.name)
                held = tuple(range(first, first + width)) if with_gpus else ()
                seats[one.name] = Seat(group=number, bundle=bundle, gpus=held)
                place += width
        made.append(
            Group(
                roles=tuple(roles),
                bundles=len(bundles),
                bundle_gpus=unit if with_gpus else 0,
                processes=tuple(tuple(names) for names in bundles),
            )
        )
    return Layout(groups=tuple(made), seats=seats)


def _too_few(
    processes: Sequence[Process], found: Layout, placement: PlacementConfig, gpus: int
) -> UsageError:
    shares = ", ".join(f"{' + '.join(group.roles)} {group.gpus}" for group in found.groups)
    together = _layout(processes, _split(processes, placement, "all"), with_gpus=True)
    fixes = []
    if together.gpus <= gpus:
        fixes.append(f"`--colocate all` ({together.gpus} GPUs)")
    fixes.append("fewer engines, ranks or tensor_parallel")
    capped = placement.gpus is not None and placement.gpus <= gpus
    return UsageError(
        f"the run needs {found.gpus} GPUs ({shares}), and "
        + (f"placement.gpus is {gpus}" if capped else f"there are {gpus}"),
        where="placement.gpus" if capped else "placement.colocate",
        fix=", ".join(fixes),
    )
