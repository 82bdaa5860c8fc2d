"""Conformance kit: builds inputs without an engine, and checks that components keep the contract.

    from rlx.testing import check_estimator, estimator_inputs

The checks raise `ConformanceError`, which lists every violation with its smallest counter-example.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx.testing.agents import check_agent
    from rlx.testing.corrections import check_correction
    from rlx.testing.episodes import agent_task, play_agent
    from rlx.testing.estimators import check_estimator
    from rlx.testing.groups import group_inputs
    from rlx.testing.inputs import correction_inputs, estimator_inputs, loss_inputs
    from rlx.testing.losses import check_loss
    from rlx.testing.objectives import check_objective
    from rlx.testing.offline import objective_inputs
    from rlx.testing.package import check_plugin
    from rlx.testing.rewards import check_reward
    from rlx.testing.samplers import check_sampler
    from rlx.testing.samples import reward_inputs
    from rlx.testing.trackers import check_tracker
    from rlx.testing.violations import ConformanceError, Violation

_HOMES = {
    "ConformanceError": "violations",
    "Violation": "violations",
    "agent_task": "episodes",
    "check_agent": "agents",
    "check_correction": "corrections",
    "check_estimator": "estimators",
    "check_loss": "losses",
    "check_objective": "objectives",
    "check_plugin": "package",
    "check_reward": "rewards",
    "check_sampler": "samplers",
    "check_tracker": "trackers",
    "correction_inputs": "inputs",
    "estimator_inputs": "inputs",
    "group_inputs": "groups",
    "loss_inputs": "inputs",
    "objective_inputs": "offline",
    "play_agent": "episodes",
    "reward_inputs": "samples",
}

__all__ = [
    "ConformanceError",
    "Violation",
    "agent_task",
    "check_agent",
    "check_correction",
    "check_estimator",
    "check_loss",
    "check_objective",
    "check_plugin",
    "check_reward",
    "check_sampler",
    "check_tracker",
    "correction_inputs",
    "estimator_inputs",
    "group_inputs",
    "loss_inputs",
    "objective_inputs",
    "play_agent",
    "reward_inputs",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rlx.testing' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"rlx.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
