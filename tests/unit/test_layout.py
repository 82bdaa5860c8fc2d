"""Which process gets which GPUs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.config import RunConfig
from rlx.core.config_placement import PlacementConfig
from rlx.core.errors import UsageError
from rlx.core.layout import Layout, Process, lay_out


def processes(
    *, ranks: int = 1, engines: int = 1, width: int = 1, rewards: int = 0, critic: bool = False
) -> list[Process]:
    return [
        *(Process(name=f"learner-{n}", role="learner", gpus=1) for n in range(ranks)),
        Process(name="reference", role="reference", gpus=1),
        *(Process(name=f"critic-{n}", role="critic", gpus=1) for n in range(ranks * critic)),
        *(Process(name=f"engine-{n}", role="engines", gpus=width) for n in range(engines)),
        *(Process(name=f"rewards-{n}", role="rewards", gpus=1) for n in range(rewards)),
        Process(name="tools-0", role="rewards", gpus=0),
    ]


def place(wanted: list[Process], there: int, **settings: Any) -> Layout:
    return lay_out(wanted, PlacementConfig(**settings), gpus=there, node_gpus=min(there, 8))


def held(layout: Layout) -> dict[str, list[tuple[int, int, int]]]:
    """The GPUs of each process, as (group, bundle, number)."""
    return {
        name: [(seat.group, seat.bundle, gpu) for gpu in seat.gpus]
        for name, seat in layout.seats.items()
    }


def test_roles_have_gpus_of_their_own_where_there_are_enough() -> None:
    found = place(processes(ranks=2, engines=2, width=2), 8)
    assert [group.roles for group in found.groups] == [("learner",), ("reference",), ("engines",)]
    assert [(group.bundles, group.bundle_gpus) for group in found.groups] == [
        (2, 1),
        (1, 1),
        (2, 2),
    ]
    assert found.gpus == 7
    assert "tools-0" not in found.seats


def test_all_roles_share_where_there_are_not() -> None:
    found = place(processes(ranks=2, engines=1, width=2), 2)
    assert [group.roles for group in found.groups] == [("learner", "reference", "engines")]
    assert held(found) == {
        "learner-0": [(0, 0, 0)],
        "learner-1": [(0, 0, 1)],
        "reference": [(0, 0, 0)],
        "engine-0": [(0, 0, 0), (0, 0, 1)],
    }
    assert found.sharing("engines") == ("learner", "reference")


@pytest.mark.parametrize(
    ("colocate", "groups"),
    [
        ("none", [["learner"], ["reference"], ["critic"], ["engines"], ["rewards"]]),
        ("all", [["learner", "reference", "critic", "engines", "rewards"]]),
        ("actor_ref", [["learner", "reference"], ["critic"], ["engines"], ["rewards"]]),
        ("critic_reward", [["learner"], ["reference"], ["critic", "rewards"], ["engines"]]),
        (
            ["actor_ref", "critic_reward"],
            [["learner", "reference"], ["critic", "rewards"], ["engines"]],
        ),
        (
            [["learner", "engines"], ["critic", "reference"]],
            [["learner", "engines"], ["critic", "reference"], ["rewards"]],
        ),
    ],
)
def test_the_groups_that_are_asked_for(colocate: Any, groups: list[list[str]]) -> None:
    found = place(processes(critic=True, rewards=1), 8, colocate=colocate)
    assert sorted(map(sorted, groups)) == sorted(sorted(group.roles) for group in found.groups)


@given(
    ranks=st.integers(1, 6),
    engines=st.integers(1, 5),
    width=st.sampled_from([1, 2, 4]),
    rewards=st.integers(0, 3),
    critic=st.booleans(),
    colocate=st.sampled_from(["all", "none", "actor_ref", "critic_reward"]),
)
def test_no_two_processes_of_a_role_share_a_gpu_and_none_is_beyond_its_bundle(
    ranks: int, engines: int, width: int, rewards: int, critic: bool, colocate: str
) -> None:
    wanted = processes(ranks=ranks, engines=engines, width=width, rewards=rewards, critic=critic)
    found = lay_out(wanted, PlacementConfig(colocate=colocate), gpus=64, node_gpus=8)
    taken = held(found)
    assert set(taken) == {one.name for one in wanted if one.gpus}
    by_role = Counter((one.role, gpu) for one in wanted for gpu in taken.get(one.name, []))
    assert max(by_role.values()) == 1
    for one in wanted:
        if one.gpus:
            seat = found.seats[one.name]
            group = found.groups[seat.group]
            assert one.role in group.roles
            assert len(seat.gpus) == one.gpus
            assert max(seat.gpus) < group.bundle_gpus
            assert seat.bundle < group.bundles
            assert one.name in group.processes[seat.bundle]


def test_too_few_gpus_are_told_with_what_would_fit() -> None:
    with pytest.raises(UsageError) as caught:
        place(processes(ranks=2, engines=2), 4, colocate="none")
    assert "needs 5 GPUs (learner 2, reference 1, engines 2), and there are 4" in caught.value.what
    assert "`--colocate all` (2 GPUs)" in str(caught.value.fix)
    with pytest.raises(UsageError, match=r"placement\.gpus is 1") as caught:
        place(processes(ranks=2), 8, gpus=1)
    assert "--colocate all" not in str(caught.value.fix)


def test_an_engine_does_not_cross_nodes() -> None:
    with pytest.raises(UsageError, match="has to lie on one node, and no node has more than 2"):
        lay_out(processes(width=4), PlacementConfig(), gpus=16, node_gpus=2)


def test_a_role_is_in_one_group() -> None:
    with pytest.raises(UsageError, match="learner is in two groups"):
        place(processes(), 8, colocate=[["learner", "reference"], ["learner", "engines"]])


def test_without_gpus_every_process_has_a_bundle_of_its_own() -> None:
    found = place(processes(ranks=2, engines=2, width=2), 0)
    assert found.gpus == 0
    assert [group.processes for group in found.groups] == [
        (("learner-0",), ("learner-1",)),
        (("reference",),),
        (("engine-0",), ("engine-1",)),
    ]
    assert place(processes(), 8, gpus=0).gpus == 0


def test_an_unknown_role_or_name_is_refused() -> None:
    for colocate in ("actors", [["learner", "refference"]]):
        with pytest.raises(ValueError, match="colocate"):
            RunConfig.model_validate({"placement": {"colocate": colocate}})
