"""What is known of GPUs before Ray starts."""

from __future__ import annotations

from typing import Any

import pytest
from test_preflight import INFO

from rlx.core import preflight_placement
from rlx.core.config import RunConfig
from rlx.core.machine import Gpu
from rlx.core.plugins import PluginSystem
from rlx.core.preflight_case import Case
from rlx.core.selection import select

GPU = Gpu(name="g", memory=2**30)


def findings(monkeypatch: pytest.MonkeyPatch, gpus: int, **changes: Any) -> list[tuple[str, ...]]:
    monkeypatch.setattr(preflight_placement, "find_gpus", lambda: (GPU,) * gpus)
    config = RunConfig.model_validate(changes)
    chosen = select(config, PluginSystem.load())
    case = Case(config=config, selection=chosen, info=INFO, resume=False)
    found = preflight_placement.check_placement(case)
    return [(one.level, one.key, one.what, one.fix) for one in found]


def test_too_few_gpus_of_this_machine_are_told_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own: dict[str, Any] = {"placement": {"colocate": "none"}, "rollout": {"engines": 2}}
    ((level, key, what, fix),) = findings(monkeypatch, 2, **own)
    assert (level, key) == ("error", "placement.colocate")
    assert "needs 3 GPUs (learner 1, engines 2), and there are 2" in what
    assert "--colocate all" in fix
    assert findings(monkeypatch, 3, **own) == []
    assert findings(monkeypatch, 0, **own) == []
    assert findings(monkeypatch, 2, rollout={"engines": 2}) == [], "all share two"
    assert findings(monkeypatch, 1, **own, runtime={"ray_address": "head:6379"}) == []


def test_a_critic_in_the_policys_processes_shares_with_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: dict[str, Any] = {"estimator": "gae", "placement": {"colocate": "critic_reward"}}
    ((level, _, what, fix),) = findings(monkeypatch, 0, **asked)
    assert level == "error"
    assert "in the policy's processes" in what
    assert "critic.placement=apart" in fix
    assert findings(monkeypatch, 0, **asked, critic={"placement": "apart"}) == []


def test_one_process_has_no_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    inline: dict[str, Any] = {"runtime": {"kind": "inline", "ray_address": "auto"}}
    found = findings(monkeypatch, 1, **inline, placement={"colocate": "all", "gpus": 1})
    assert [(level, key) for level, key, *_ in found] == [
        ("error", "runtime.ray_address"),
        ("warning", "placement.colocate"),
        ("warning", "placement.gpus"),
    ]
    assert findings(monkeypatch, 1, runtime={"kind": "inline"}) == []
