"""A step trains policy and critic, or neither; how good values are is measured."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from test_reward_norm import batch as make_batch

from rlx.core.config import CriticConfig
from rlx.core.engine.critic import Critic, critic_metrics
from rlx.core.engine.interfaces import UpdateResult
from rlx.core.errors import ComponentError, RlxError
from rlx.core.rollouts import TrainBatch

FULL = dataclasses.replace(
    make_batch([1.0, 0.0], [2, 1]),
    returns=np.array([1.0, 1.0, 0.0], np.float32),
    values=np.array([0.5, 1.0, 0.0], np.float32),
)


class FakeGroup:
    """Answers updates in turn: False is an aborted one, an error is raised."""

    def __init__(
        self, role: str, log: list[str], answers: list[bool | RlxError], seconds: float = 0
    ) -> None:
        self.role, self.log, self.answers, self.seconds = role, log, answers, seconds

    async def update(self, batch: TrainBatch, **options: Any) -> UpdateResult | None:
        self.log.append(f"{self.role} starts")
        await asyncio.sleep(self.seconds)
        self.log.append(f"{self.role} ends")
        answer = self.answers.pop(0)
        if isinstance(answer, RlxError):
            raise answer
        if not answer:
            return None
        logprobs = np.zeros(3, np.float32) if self.role == "policy" else None
        return UpdateResult(metrics={f"{self.role}/loss": 1.0}, logprobs=logprobs)


def update(
    policy: list[Any], critic: list[Any], *, step: int = 5, batch: TrainBatch = FULL, **how: Any
) -> tuple[UpdateResult | None, list[str]]:
    log: list[str] = []
    both: list[Any] = [FakeGroup("policy", log, policy, 0.01), FakeGroup("critic", log, critic)]
    trained = Critic(both[1], CriticConfig(**how)).update_with(
        both[0], batch, step=step, kl_coef=0.1
    )
    return asyncio.run(trained), log


def test_colocated_trains_one_after_the_other() -> None:
    result, log = update([True], [True])
    assert log == ["policy starts", "policy ends", "critic starts", "critic ends"]
    assert result is not None
    assert result.metrics == {"policy/loss": 1.0, "critic/loss": 1.0}
    assert result.logprobs is not None


def test_apart_trains_both_at_once() -> None:
    result, log = update([True], [True], placement="apart")
    assert log == ["policy starts", "critic starts", "critic ends", "policy ends"]
    assert result is not None


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_abort_in_time_leaves_both_alone(placement: str) -> None:
    result, log = update([False], [False], placement=placement)
    assert result is None
    assert ("critic starts" in log) == (placement == "apart")


@pytest.mark.parametrize(
    ("policy", "critic"), [([False, True], [True]), ([True], [False, True]), ([True], [True])]
)
def test_abort_of_one_that_came_too_late_for_the_other_is_made_good(
    policy: list[bool], critic: list[bool]
) -> None:
    result, _ = update(policy, critic, placement="apart")
    assert result is not None
    assert set(result.metrics) == {"policy/loss", "critic/loss"}
    assert not policy
    assert not critic


def test_abort_after_the_policys_step_does_not_lose_the_critics() -> None:
    result, _ = update([True], [False, True])
    assert result is not None
    assert "critic/loss" in result.metrics


@pytest.mark.parametrize("placement", ["colocated", "apart"])
def test_warm_up_trains_the_critic_alone(placement: str) -> None:
    result, log = update([], [True], step=1, warmup_steps=2, placement=placement)
    assert log == ["critic starts", "critic ends"]
    assert result is not None
    assert result.metrics == {"critic/loss": 1.0}
    assert result.logprobs is FULL.rollout_logprobs
    after, _ = update([True], [True], step=2, warmup_steps=2, placement=placement)
    assert after is not None
    assert "policy/loss" in after.metrics


def failure() -> RlxError:
    """As a learner raises it before its first optimizer step."""
    error = ComponentError("the loss failed")
    error.weights_changed = False
    return error


@pytest.mark.parametrize(
    ("policy", "critic", "placement", "changed"),
    [
        ([failure()], [], "colocated", False),
        ([True], [failure()], "colocated", True),
        ([failure()], [True], "apart", True),
        ([True], [failure()], "apart", True),
        ([failure()], [failure()], "apart", False),
        ([failure()], [False], "apart", False),
        ([False, failure()], [True], "apart", True),
    ],
)
def test_error_says_whether_either_model_has_changed(
    policy: list[Any], critic: list[Any], placement: str, changed: bool
) -> None:
    with pytest.raises(ComponentError, match="the loss failed") as caught:
        update(policy, critic, placement=placement)
    assert caught.value.weights_changed is changed


def test_estimator_without_returns_is_told_so() -> None:
    with pytest.raises(ComponentError, match="no returns"):
        update([True], [True], batch=dataclasses.replace(FULL, returns=None))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 1.0, 0.0], 1.0),
        ([0.5, 0.5, 0.5], 0.0),
        ([3.0, 3.0, 2.0], 1.0),
        ([0.0, 0.0, 1.0], -3.0),
    ],
)
def test_explained_variance(values: list[float], expected: float) -> None:
    metrics = critic_metrics(dataclasses.replace(FULL, values=np.array(values, np.float32)))
    assert metrics["critic/explained_variance"] == pytest.approx(expected)
    assert metrics["critic/value_mean"] == pytest.approx(np.mean(values))
    assert metrics["critic/return_mean"] == pytest.approx(2 / 3)


def test_explained_variance_of_equal_returns_is_zero() -> None:
    same = dataclasses.replace(FULL, returns=np.ones(3, np.float32))
    assert critic_metrics(same)["critic/explained_variance"] == 0


def test_no_critic_no_metrics() -> None:
    assert critic_metrics(dataclasses.replace(FULL, values=None)) == {}
