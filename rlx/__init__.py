"""rlx: a plugin SDK for reinforcement-learning post-training of language models.

The public API is this module's names. They are imported when they are first used, so that
`import rlx` costs nothing and a reward plugin doesn't load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rlx.core.api import API_VERSION as API_VERSION

if TYPE_CHECKING:
    from torch import Tensor

    from rlx.core.agents import Episode, Step, Turn
    from rlx.core.component import Bound, component
    from rlx.core.config import RunConfig
    from rlx.core.engine.offline.run import train_offline
    from rlx.core.engine.train import train
    from rlx.core.errors import ComponentError, UsageError
    from rlx.core.hookspecs import RunView, WorkerContext, hookimpl
    from rlx.core.inputs import (
        Advantages,
        CorrectionInputs,
        EstimatorInputs,
        LossInputs,
        LossOutputs,
    )
    from rlx.core.offline.inputs import ObjectiveInputs, ObjectiveOutputs
    from rlx.core.plugins import PluginSystem, resolve
    from rlx.core.references import ComponentRef
    from rlx.core.rewards import Reward, RewardInputs
    from rlx.core.rollouts import Group, Rollout, Span, Task, TrainBatch
    from rlx.core.samplers import Drop
    from rlx.core.tool_calls import parse_tool_calls

_HOMES = {
    "Advantages": "rlx.core.inputs",
    "Bound": "rlx.core.component",
    "ComponentError": "rlx.core.errors",
    "ComponentRef": "rlx.core.references",
    "CorrectionInputs": "rlx.core.inputs",
    "Drop": "rlx.core.samplers",
    "Episode": "rlx.core.agents",
    "EstimatorInputs": "rlx.core.inputs",
    "Group": "rlx.core.rollouts",
    "LossInputs": "rlx.core.inputs",
    "LossOutputs": "rlx.core.inputs",
    "ObjectiveInputs": "rlx.core.offline.inputs",
    "ObjectiveOutputs": "rlx.core.offline.inputs",
    "PluginSystem": "rlx.core.plugins",
    "Reward": "rlx.core.rewards",
    "RewardInputs": "rlx.core.rewards",
    "Rollout": "rlx.core.rollouts",
    "RunConfig": "rlx.core.config",
    "RunView": "rlx.core.hookspecs",
    "Span": "rlx.core.rollouts",
    "Step": "rlx.core.agents",
    "Task": "rlx.core.rollouts",
    "Tensor": "torch",
    "TrainBatch": "rlx.core.rollouts",
    "Turn": "rlx.core.agents",
    "UsageError": "rlx.core.errors",
    "WorkerContext": "rlx.core.hookspecs",
    "component": "rlx.core.component",
    "hookimpl": "rlx.core.hookspecs",
    "parse_tool_calls": "rlx.core.tool_calls",
    "resolve": "rlx.core.plugins",
    "train": "rlx.core.engine.train",
    "train_offline": "rlx.core.engine.offline.run",
}

__all__ = [  # noqa: RUF022 (constants first)
    "API_VERSION",
    "__version__",
    "Advantages",
    "Bound",
    "ComponentError",
    "ComponentRef",
    "CorrectionInputs",
    "Drop",
    "Episode",
    "EstimatorInputs",
    "Group",
    "LossInputs",
    "LossOutputs",
    "ObjectiveInputs",
    "ObjectiveOutputs",
    "PluginSystem",
    "Reward",
    "RewardInputs",
    "Rollout",
    "RunConfig",
    "RunView",
    "Span",
    "Step",
    "Task",
    "Tensor",
    "TrainBatch",
    "Turn",
    "UsageError",
    "WorkerContext",
    "component",
    "hookimpl",
    "parse_tool_calls",
    "resolve",
    "train",
    "train_offline",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from rlx.core.discovery import own_version

        return own_version() or "0+unknown"
    if name not in _HOMES:
        raise AttributeError(f"module 'rlx' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
