"""Running an estimator: shapes, KL in the reward, errors that name the estimator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlx.core.advantages import estimate
from rlx.core.component import component
from rlx.core.errors import ComponentError
from rlx.core.inputs import Advantages, EstimatorInputs
from rlx.testing.inputs import estimator_inputs

KL = {"kl_coef": 0.5, "kl_estimator": "k1", "kl_in_reward": True}


def outcome(x: EstimatorInputs) -> Any:
    return x.rewards


def per_token(x: EstimatorInputs) -> Any:
    return x.discounted_sum(x.token_rewards)


def inputs(lengths: list[int], rewards: list[float]) -> EstimatorInputs:
    n = sum(lengths)
    return estimator_inputs(
        rewards=rewards, lengths=lengths, old_logprobs=[-1.0] * n, ref_logprobs=[-2.0] * n
    )


def test_outcomes_are_spread_over_the_rollout() -> None:
    found = estimate(outcome, inputs([2, 0, 1], [1.0, 5.0, 2.0]))
    assert found.advantages.tolist() == [1.0, 1.0, 2.0]
    assert found.returns is None


def test_kl_in_the_reward_reaches_outcome_estimators_as_return_to_go() -> None:
    found = estimate(outcome, inputs([2, 0, 1], [1.0, 5.0, 2.0]), **KL)
    assert found.advantages.tolist() == [0.0, 0.5, 1.5]  # k1 is 1 everywhere: −0.5 a token


def test_kl_in_the_reward_is_in_the_token_rewards_once() -> None:
    found = estimate(per_token, inputs([2, 0, 1], [1.0, 5.0, 2.0]), **KL)
    assert found.advantages.tolist() == [0.0, 0.5, 1.5]


def test_kl_in_the_loss_leaves_advantages_alone() -> None:
    x = inputs([2, 0, 1], [1.0, 5.0, 2.0])
    found = estimate(outcome, x, kl_coef=0.5, kl_estimator="k1", kl_in_reward=False)
    assert found.advantages.tolist() == [1.0, 1.0, 2.0]


@pytest.mark.parametrize(("estimator", "expected"), [(outcome, [1, 1]), (per_token, [0, 1])])
def test_as_many_tokens_as_rollouts_is_not_ambiguous(estimator: Any, expected: list[float]) -> None:
    x = inputs([2, 0], [1.0, 7.0]).replace(token_rewards=torch.tensor([-1.0, 1.0]))
    assert estimate(estimator, x).advantages.tolist() == expected
    one_each = inputs([1, 1], [1.0, 7.0])
    with_kl = estimate(estimator, one_each, **KL).advantages
    assert with_kl.tolist() == [0.5, 6.5]


def test_asking_twice_leaves_no_trace_in_the_state() -> None:
    class Counting:
        name = "counting"

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, x: EstimatorInputs) -> Any:
            self.calls += 1
            return x.rewards

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    estimator = Counting()
    estimate(estimator, inputs([1, 1], [1.0, 2.0]))
    assert estimator.calls == 1


def test_returns_of_a_critic_are_passed_on() -> None:
    def with_critic(x: EstimatorInputs) -> Any:
        return Advantages(x.token_rewards, returns=x.token_rewards + 1, metrics={"note": 3.0})

    found = estimate(with_critic, inputs([2], [1.0]))
    assert found.returns is not None
    assert found.returns.tolist() == [1.0, 2.0]
    assert found.metrics["note"] == 3.0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (torch.zeros(7), r"shape \[7\].*B = 2 rollouts and N = 3 tokens"),
        (torch.zeros(3, 1), r"shape \[3, 1\]"),
        (torch.tensor(0.0), r"shape \[\]"),
        ([0.0, 0.0], "returned list"),
        (torch.tensor([0.0, torch.nan]), "1 of 2 values not finite|1 of 3 values not finite"),
        (Advantages(torch.zeros(3), returns=torch.zeros(2)), r"returns of shape \[2\]"),
        (Advantages(torch.zeros(3), returns=torch.full((3,), torch.inf)), "3 of 3 values"),
    ],
)
def test_wrong_answers_name_the_estimator(answer: Any, message: str) -> None:
    def wrong(x: EstimatorInputs) -> Any:
        return answer

    with pytest.raises(ComponentError, match=message) as caught:
        estimate(wrong, inputs([2, 1], [1.0, 2.0]))
    assert "'wrong'" in str(caught.value)


def test_groups_of_one_are_counted_where_groups_are_compared() -> None:
    @component(requires={"groups"})
    def compares(x: EstimatorInputs) -> Any:
        return x.rewards

    x = estimator_inputs(rewards=[1.0, 2.0, 3.0], group=[0, 0, 1], lengths=[1, 2, 1])
    assert estimate(compares, x).metrics == {"group/single": 1.0}
    assert estimate(outcome, x).metrics == {}
