"""Whether a run fits its GPUs, and what would make it fit."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import yaml
from test_sizes import INFO

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.machine import Gpu, Machine
from rlx.core.memory import CONTEXT, Load
from rlx.core.plugins import PluginSystem
from rlx.core.remedies import judge, remedies
from rlx.core.selection import select

GIB = 2**30
SEVEN = dataclasses.replace(
    INFO,
    parameters=7_615_283_200,
    hidden_size=3584,
    layers=28,
    kv_width=512,
    vocab_size=152_064,
    dtype="bfloat16",
    context_length=4096,
)
"""A model of seven billion parameters."""
SHORT: dict[str, Any] = {"data": {"max_prompt_tokens": 1024}, "rollout": {"max_new_tokens": 1024}}


def machine(gpus: int, gib: int = 80) -> Machine:
    device = Gpu(name="g", memory=gib * GIB)
    return Machine(
        cpus=8,
        memory=64 * GIB,
        memory_available=64 * GIB,
        shared_memory=GIB,
        gpus=(device,) * gpus,
    )


def merged(*trees: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(value, dict) else value
    return found


def loads(*changes: dict[str, Any], gpus: int, gib: int = 80) -> list[Load]:
    config = RunConfig.model_validate(merged(SHORT, *changes))
    chosen = select(config, PluginSystem.load())
    return judge(config, chosen, SEVEN, machine(gpus, gib), node_gpus=8)[1]


def ways(*changes: dict[str, Any], gpus: int) -> list[str]:
    config = RunConfig.model_validate(merged(SHORT, *changes))
    chosen = select(config, PluginSystem.load())
    return remedies(config, chosen, SEVEN, machine(gpus), node_gpus=8)


def held(config: RunConfig) -> int:
    assert SEVEN.parameters is not None
    return sizes.training_bytes(config, SEVEN, SEVEN.parameters)


def test_roles_apart_are_judged_apart() -> None:
    learner, engine = loads(gpus=2)
    config = RunConfig.model_validate(SHORT)
    assert (
        learner.bytes
        == held(config) + sizes.activation_bytes(config, SEVEN, accelerated=True) + CONTEXT
    )
    assert learner.phase == "update"
    assert not learner.fits
    assert engine.bytes == 40 * GIB + CONTEXT
    assert engine.phase == "rollout"
    assert engine.fits


@pytest.mark.parametrize(
    ("placement", "rollout", "asleep"),
    [
        ({}, {}, True),
        ({"sleep_level": 0}, {}, False),
        ({}, {"max_staleness": 1}, False),
    ],
)
def test_an_engine_that_sleeps_leaves_its_gpu_to_the_update(
    placement: dict[str, Any], rollout: dict[str, Any], asleep: bool
) -> None:
    changes: dict[str, Any] = {"placement": {"colocate": "all", **placement}, "rollout": rollout}
    (both,) = loads(changes, gpus=1)
    config = RunConfig.model_validate(merged(SHORT, changes))
    engine = 40 * GIB
    rolling = held(config) + engine
    updating = (
        held(config)
        + sizes.activation_bytes(config, SEVEN, accelerated=True)
        + (0 if asleep else engine)
    )
    assert both.bytes == max(rolling, updating) + 2 * CONTEXT


def test_zero_and_a_split_engine_divide_what_a_gpu_holds() -> None:
    three = {"learner": {"ranks": 4, "zero_stage": 3}, "placement": {"colocate": "none"}}
    wide = {"rollout": {"tensor_parallel": 4}}
    one, _ = loads(gpus=2)
    four, _ = loads(three, wide, gpus=8)
    config = RunConfig.model_validate(merged(SHORT, three))
    assert one.bytes - four.bytes == held(RunConfig.model_validate(SHORT)) * 3 // 4
    assert (
        four.bytes
        == held(config) + sizes.activation_bytes(config, SEVEN, accelerated=True) + CONTEXT
    )


def test_critic_and_policy_that_train_at_once_share_one_gpu_s_memory() -> None:
    gae: dict[str, Any] = {"estimator": "gae", "placement": {"colocate": "all"}}
    turns = loads(gae, gpus=1)[0]
    at_once = loads(gae, {"critic": {"placement": "apart"}}, gpus=1)[0]
    assert at_once.bytes - turns.bytes > CONTEXT - GIB // 4


def test_what_is_told_to_make_it_fit_does() -> None:
    for gpus in (2, 8):
        found = ways(gpus=gpus)
        assert found
        for way in found:
            if " such " in way:
                assert gpus == 2
                continue
            tree: dict[str, Any] = {}
            for pair in way.split():
                key, _, value = pair.partition("=")
                section, _, name = key.partition(".")
                tree.setdefault(section, {})[name] = yaml.safe_load(value)
            assert all(load.fits for load in loads(tree, gpus=gpus)), way
    assert any("learner.zero_stage=3" in way for way in ways(gpus=8))
    (more,) = ways(gpus=1)
    assert more.startswith("4 such GPUs with ")


def test_without_gpus_the_machine_holds_everything() -> None:
    (load,) = loads(gpus=0)
    assert load.where == "this machine"
    assert load.limit == 64 * GIB
    assert not load.fits
