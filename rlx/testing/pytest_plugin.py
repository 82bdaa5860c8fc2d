"""The conformance kit as pytest fixtures, for plugins' own tests.

    def test_my_estimator(check_estimator):
        check_estimator("my_package:my_estimator", eps=1e-3)

pytest loads this module at every start: it imports nothing but pytest, and the kit when used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def _fixture(name: str) -> Callable[..., Any]:
    def provide() -> Any:
        import rlx.testing

        return getattr(rlx.testing, name)

    provide.__doc__ = f"`rlx.testing.{name}`."
    provide.__name__ = name
    return pytest.fixture(scope="session", name=name)(provide)


agent_task = _fixture("agent_task")
check_agent = _fixture("check_agent")
check_correction = _fixture("check_correction")
check_estimator = _fixture("check_estimator")
check_loss = _fixture("check_loss")
check_objective = _fixture("check_objective")
check_plugin = _fixture("check_plugin")
check_reward = _fixture("check_reward")
check_sampler = _fixture("check_sampler")
check_tracker = _fixture("check_tracker")
correction_inputs = _fixture("correction_inputs")
estimator_inputs = _fixture("estimator_inputs")
group_inputs = _fixture("group_inputs")
loss_inputs = _fixture("loss_inputs")
objective_inputs = _fixture("objective_inputs")
play_agent = _fixture("play_agent")
reward_inputs = _fixture("reward_inputs")
