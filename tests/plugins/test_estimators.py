"""Every estimator against plain Python loops written from its paper, on ragged batches.

A rollout is a dict; a batch is a list of them. Nothing here shares code with the estimators.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.core.advantages import estimate
from rlx.core.inputs import Advantages, EstimatorInputs
from rlx.plugins.estimators.batch_mean import batch_mean
from rlx.plugins.estimators.dr_grpo import dr_grpo
from rlx.plugins.estimators.gae import gae
from rlx.plugins.estimators.gdpo import gdpo
from rlx.plugins.estimators.gpg import gpg
from rlx.plugins.estimators.group_norm import group_norm
from rlx.plugins.estimators.grpo_passk import grpo_passk
from rlx.plugins.estimators.maxrl import maxrl
from rlx.plugins.estimators.opo import opo
from rlx.plugins.estimators.reinforce import reinforce
from rlx.plugins.estimators.reinforce_baseline import reinforce_baseline
from rlx.plugins.estimators.remax import remax
from rlx.plugins.estimators.rloo import rloo
from rlx.plugins.estimators.turn_returns import turn_returns
from rlx.testing.inputs import estimator_inputs

Rollout = dict[str, Any]
Batch = list[Rollout]

# Tenths: equal rewards are frequent, and sums of them are not exact.
tenths = st.integers(-20, 20).map(lambda n: n / 10)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    batch: Batch = []
    for group in range(draw(st.integers(1, 4))):
        constant = draw(st.booleans())
        shared = draw(tenths)
        for _ in range(draw(st.integers(1, 4))):
            length = draw(st.sampled_from([0, 1, 1, 2, 3, 5]))
            turns = sorted(draw(st.lists(st.integers(0, 2), min_size=length, max_size=length)))
            per_token = st.lists(tenths, min_size=length, max_size=length)
            batch.append(
                {
                    "group": 7 - group,
                    "reward": shared if constant else draw(tenths),
                    "turns": turns,
                    "token_rewards": draw(per_token),
                    "values": draw(per_token),
                    "kl": draw(per_token),
                    "greedy": draw(tenths),
                    "parts": {"a": draw(tenths), "b": draw(st.sampled_from([0.0, 1.0]))},
                }
            )
    return draw(st.permutations(batch))


WEIGHTS = {"a": 0.5}


def inputs_of(batch: Batch) -> EstimatorInputs:
    def flat(name: str) -> list[Any]:
        return [value for rollout in batch for value in rollout[name]]

    return estimator_inputs(
        rewards=[rollout["reward"] for rollout in batch],
        group=[rollout["group"] for rollout in batch],
        lengths=[len(rollout["turns"]) for rollout in batch],
        turn=flat("turns"),
        token_rewards=flat("token_rewards"),
        values=flat("values"),
        kl_rewards=flat("kl"),
        greedy_rewards=[rollout["greedy"] for rollout in batch],
        parts={name: [rollout["parts"][name] for rollout in batch] for name in ("a", "b")},
        part_weights=WEIGHTS,
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def stdev(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    m = mean(values)
    return math.sqrt(sum((v - m) ** 2 for v in values) / (len(values) - 1))


def peers(batch: Batch, rollout: Rollout) -> Batch:
    return [other for other in batch if other["group"] == rollout["group"]]


def group_rewards(batch: Batch, rollout: Rollout) -> list[float]:
    return [other["reward"] for other in peers(batch, rollout)]


def whitened(values: list[float], scale: bool = True) -> list[float]:
    if not values:
        return []
    m = mean(values)
    variance = mean([(v - m) ** 2 for v in values])
    divisor = math.sqrt(max(variance, 1e-8)) if scale else 1.0
    return [(v - m) / divisor for v in values]


def ref_group_norm(batch: Batch, eps: float = 1e-9) -> list[float]:
    out = []
    for rollout in batch:
        rewards = group_rewards(batch, rollout)
        out.append((rollout["reward"] - mean(rewards)) / (stdev(rewards) + eps))
    return out


def ref_dr_grpo(batch: Batch) -> list[float]:
    return [r["reward"] - mean(group_rewards(batch, r)) for r in batch]


def ref_rloo(batch: Batch) -> list[float]:
    out = []
    for rollout in batch:
        others = [o["reward"] for o in peers(batch, rollout) if o is not rollout]
        out.append(rollout["reward"] - mean(others) if others else 0.0)
    return out


def ref_batch_mean(batch: Batch) -> list[float]:
    everyone = [r["reward"] for r in batch]
    return [r["reward"] - mean(everyone) for r in batch]


def ref_opo(batch: Batch) -> list[float]:
    out = []
    for rollout in batch:
        group = peers(batch, rollout)
        total = sum(len(o["turns"]) for o in group)
        if total:
            baseline = sum(len(o["turns"]) * o["reward"] for o in group) / total
        else:  # nobody said anything: no token gets this number
            baseline = mean(group_rewards(batch, rollout))
        out.append(rollout["reward"] - baseline)
    return out


def ref_gpg(batch: Batch) -> list[float]:
    groups = {r["group"] for r in batch}
    varied = {r["group"] for r in batch if len(set(group_rewards(batch, r))) > 1}
    factor = len(groups) / len(varied) if varied else 1.0
    return [factor * a for a in ref_dr_grpo(batch)]


def ref_maxrl(batch: Batch) -> list[float]:
    out = []
    for rollout in batch:
        m = mean(group_rewards(batch, rollout))
        out.append((rollout["reward"] - m) / m if m > 1e-12 else 0.0)
    return out


def ref_gdpo(batch: Batch, eps: float = 1e-6) -> list[float]:
    sums = [0.0] * len(batch)
    for name in ("a", "b"):
        for index, rollout in enumerate(batch):
            scores = [o["parts"][name] for o in peers(batch, rollout)]
            normed = (rollout["parts"][name] - mean(scores)) / (stdev(scores) + eps)
            if len(set(scores)) == 1:
                normed = 0.0
            sums[index] += WEIGHTS.get(name, 1.0) * normed
    if max(map(abs, sums)) < 1e-9:
        return [0.0] * len(batch)
    return [(s - mean(sums)) / (stdev(sums) + eps) for s in sums]


def ref_remax(batch: Batch) -> list[float]:
    return [r["reward"] - r["greedy"] for r in batch]


def ref_grpo_passk(batch: Batch, scale: bool = False, eps: float = 1e-6) -> list[float]:
    out = [0.0] * len(batch)
    for group in {r["group"] for r in batch}:
        members = [i for i, r in enumerate(batch) if r["group"] == group]
        ranked = sorted(members, key=lambda i: batch[i]["reward"], reverse=True)
        if len(ranked) > 1:
            lead = batch[ranked[0]]["reward"] - batch[ranked[1]]["reward"]
            spread = stdev([batch[i]["reward"] for i in members]) + eps
            out[ranked[0]] = lead / spread if scale else lead
    return out


def returns_to_go(rewards: list[float], gamma: float) -> list[float]:
    out: list[float] = []
    running = 0.0
    for reward in reversed(rewards):
        running = reward + gamma * running
        out.append(running)
    return out[::-1]


def ref_reinforce(batch: Batch, gamma: float = 1.0, whiten: bool = True) -> list[float]:
    flat = [g for r in batch for g in returns_to_go(r["token_rewards"], gamma)]
    return whitened(flat, whiten)


def ref_reinforce_baseline(batch: Batch, whiten: bool = True) -> list[float]:
    flat = [
        r["reward"] - mean(group_rewards(batch, r)) + to_go
        for r in batch
        for to_go in returns_to_go(r["kl"], 1.0)
    ]
    return whitened(flat, whiten)


def ref_gae(
    batch: Batch, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True
) -> tuple[list[float], list[float]]:
    flat, returns = [], []
    for rollout in batch:
        values, rewards = rollout["values"], rollout["token_rewards"]
        running, advantages = 0.0, []
        for t in reversed(range(len(values))):
            after = values[t + 1] if t + 1 < len(values) else 0.0
            running = rewards[t] + gamma * after - values[t] + gamma * lam * running
            advantages.insert(0, running)
        flat += advantages
        returns += [a + v for a, v in zip(advantages, values, strict=True)]
    return whitened(flat, whiten), returns


def ref_turn_returns(batch: Batch, turn_gamma: float = 1.0, eps: float = 1e-6) -> list[float]:
    to_go: list[dict[int, float]] = []
    for rollout in batch:
        spoken = sorted(set(rollout["turns"]))
        paid = list(zip(rollout["turns"], rollout["token_rewards"], strict=True))
        sums = [sum(reward for turn, reward in paid if turn == k) for k in spoken]
        to_go.append(dict(zip(spoken, returns_to_go(sums, turn_gamma), strict=True)))
    out = []
    for rollout, mine in zip(batch, to_go, strict=True):
        for k in rollout["turns"]:
            at_k = [
                other_to_go[k]
                for other, other_to_go in zip(batch, to_go, strict=True)
                if other["group"] == rollout["group"] and k in other_to_go
            ]
            spread = max(at_k) - min(at_k)
            out.append((mine[k] - mean(at_k)) / (stdev(at_k) + eps) if spread > 1e-9 else 0.0)
    return out


REFERENCES = [
    (group_norm, ref_group_norm, {}),
    (group_norm, ref_group_norm, {"eps": 0.3}),
    (dr_grpo, ref_dr_grpo, {}),
    (rloo, ref_rloo, {}),
    (batch_mean, ref_batch_mean, {}),
    (opo, ref_opo, {}),
    (gpg, ref_gpg, {}),
    (gdpo, ref_gdpo, {}),
    (remax, ref_remax, {}),
    (grpo_passk, ref_grpo_passk, {}),
    (grpo_passk, ref_grpo_passk, {"scale": True}),
    (reinforce, ref_reinforce, {}),
    (reinforce, ref_reinforce, {"gamma": 0.9, "whiten": False}),
    (reinforce_baseline, ref_reinforce_baseline, {}),
    (reinforce_baseline, ref_reinforce_baseline, {"whiten": False}),
    (turn_returns, ref_turn_returns, {}),
    (turn_returns, ref_turn_returns, {"turn_gamma": 0.5, "eps": 0.1}),
]


@pytest.mark.parametrize(
    ("estimator", "reference", "params"),
    REFERENCES,
    ids=[f"{f.__name__}-{p}" for f, _, p in REFERENCES],
)
def test_estimator_equals_its_reference(estimator: Any, reference: Any, params: Any) -> None:
    @settings(max_examples=40)
    @given(batches())
    def check(batch: Batch) -> None:
        found = estimator(inputs_of(batch), **params)
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx(reference(batch, **params), abs=1e-6, rel=1e-6)

    check()


@settings(max_examples=60)
@given(batches())
def test_maxrl_equals_its_reference_on_rewards_in_the_unit_interval(batch: Batch) -> None:
    for rollout in batch:
        rollout["reward"] = abs(rollout["reward"]) / 2
    assert maxrl(inputs_of(batch)).tolist() == pytest.approx(ref_maxrl(batch), abs=1e-6, rel=1e-6)


@pytest.mark.parametrize("whiten", [True, False])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 0.0), (0.0, 1.0)])
def test_gae_equals_its_reference(gamma: float, lam: float, whiten: bool) -> None:
    @settings(max_examples=25)
    @given(batches())
    def check(batch: Batch) -> None:
        found = gae(inputs_of(batch), gamma=gamma, lam=lam, whiten=whiten)
        advantages, returns = ref_gae(batch, gamma, lam, whiten)
        assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-6, rel=1e-6)
        assert found.returns is not None
        assert found.returns.tolist() == pytest.approx(returns, abs=1e-6, rel=1e-6)

    check()


PER_ROLLOUT = [group_norm, dr_grpo, rloo, opo, gpg, maxrl, gdpo, grpo_passk, batch_mean, remax]
PER_TOKEN = [gae, reinforce, reinforce_baseline, turn_returns]


@pytest.mark.parametrize(
    "estimator", [group_norm, dr_grpo, rloo, opo, gpg, maxrl, gdpo, grpo_passk]
)
@pytest.mark.parametrize("value", [0.1, 1 / 3, -7.7, 1e6 + 0.1])
def test_constant_group_gets_exactly_zero(estimator: Any, value: float) -> None:
    x = estimator_inputs(rewards=[value] * 3, lengths=[1, 2, 3], parts={"a": [value] * 3})
    assert estimator(x).tolist() == [0.0, 0.0, 0.0]


def test_constant_group_is_zero_without_eps() -> None:
    x = estimator_inputs(rewards=[0.1, 0.1, 0.1])
    assert group_norm(x, eps=0.0).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("estimator", [group_norm, dr_grpo, rloo, opo, gpg, maxrl, grpo_passk])
def test_rollout_alone_in_its_group_gets_zero(estimator: Any) -> None:
    x = estimator_inputs(rewards=[0.7, 1.0, 0.0], group=[0, 1, 1], lengths=[2, 1, 4])
    assert estimator(x)[0].item() == 0.0


def test_closed_forms() -> None:
    x = estimator_inputs(rewards=[1, 0, 0, 1, 0, 0, 0, 0], group=[0, 0, 0, 0, 1, 1, 1, 1])
    root = math.sqrt(1 / 3)
    assert group_norm(x)[:2].tolist() == pytest.approx([0.5 / root, -0.5 / root], abs=1e-8)
    assert rloo(x)[:2].tolist() == pytest.approx([2 / 3, -2 / 3])
    assert maxrl(x)[:2].tolist() == pytest.approx([1.0, -1.0])
    assert gpg(x)[:2].tolist() == pytest.approx([1.0, -1.0])  # 2 groups, 1 varied
    assert batch_mean(x)[:2].tolist() == pytest.approx([0.75, -0.25])


def test_passk_rewards_only_the_lead_of_the_best() -> None:
    x = estimator_inputs(rewards=[0.2, 0.9, 0.5, 1, 1, 0], group=[0, 0, 0, 1, 1, 1])
    assert grpo_passk(x).tolist() == pytest.approx([0, 0.4, 0, 0, 0, 0])


def test_gae_with_lambda_one_is_the_return_minus_the_value() -> None:
    x = estimator_inputs(rewards=[3.0], lengths=[3], values=[0.5, 1.0, -1.0])
    found = gae(x, lam=1.0, whiten=False)
    raw = torch.tensor([2.5, 2.0, 4.0], dtype=torch.float64)
    assert torch.allclose(found.advantages, raw - raw.mean())
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([3.0, 3.0, 3.0])


def test_two_rewards_that_sum_to_the_same_are_told_apart_by_gdpo() -> None:
    parts = {"rare": [1.0, 0.0, 0.0, 0.0], "common": [0.0, 1.0, 1.0, 0.0]}
    x = estimator_inputs(rewards=[1, 1, 1, 0], parts=parts)
    found = gdpo(x)
    assert found[0] > found[1]
    assert group_norm(x)[0] == group_norm(x)[1]


def test_turn_returns_credit_each_turn_with_what_follows() -> None:
    x = estimator_inputs(
        rewards=[1, 1], lengths=[2, 2], turn=[0, 1, 0, 1], token_rewards=[1.0, 0.0, 0.0, 1.0]
    )
    found = turn_returns(x)
    assert found[:3:2].tolist() == [0.0, 0.0]  # both get 1 from turn 0 on
    assert found[1] == -found[3] < 0  # only the second earns anything at turn 1


@pytest.mark.parametrize("estimator", [*PER_ROLLOUT, *PER_TOKEN])
def test_inputs_are_not_mutated_and_answers_repeat(estimator: Any) -> None:
    batch = [
        {
            "group": i % 2,
            "reward": i / 3,
            "turns": [0, 1],
            "token_rewards": [0.1, i / 3],
            "values": [0.2, 0.1],
            "kl": [0.0, -0.1],
            "greedy": 0.5,
            "parts": {"a": float(i), "b": 1.0 - i},
        }
        for i in range(4)
    ]
    x, before = inputs_of(batch), inputs_of(batch)
    first, second = estimate(estimator, x), estimate(estimator, x)
    assert torch.equal(first.advantages, second.advantages)
    for name in ("rewards", "token_rewards", "lengths", "group", "turn", "values", "kl_rewards"):
        assert torch.equal(x.get(name), before.get(name))


@pytest.mark.parametrize("estimator", [*PER_ROLLOUT, *PER_TOKEN])
@settings(max_examples=10)
@given(batch=batches(), seed=st.integers(0, 99))
def test_order_of_rollouts_does_not_matter(estimator: Any, batch: Batch, seed: int) -> None:
    def by_rollout(order: list[int]) -> dict[int, list[float]]:
        shuffled = [batch[i] for i in order]
        flat = estimate(estimator, inputs_of(shuffled)).advantages.tolist()
        out = {}
        for i, rollout in zip(order, shuffled, strict=True):
            count = len(rollout["turns"])
            out[i], flat = flat[:count], flat[count:]
        return out

    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(batch), generator=generator).tolist()
    same, other = by_rollout(list(range(len(batch)))), by_rollout(order)
    for i in same:
        assert other[i] == pytest.approx(same[i], abs=1e-6)


@pytest.mark.parametrize("estimator", [*PER_ROLLOUT, *PER_TOKEN])
def test_large_rewards_stay_finite_in_float32(estimator: Any) -> None:
    rewards = torch.tensor([1e6, -1e6, 1e6, 0.0])
    x = estimator_inputs(
        rewards=rewards,
        lengths=[1, 0, 3, 1],
        turn=[0, 0, 1, 1, 0],
        values=torch.full((5,), 1e6),
        greedy_rewards=rewards,
        parts={"a": rewards},
    )
    found = estimator(x)
    found = found.advantages if isinstance(found, Advantages) else found
    assert found.dtype == torch.float32
    assert found.isfinite().all()


@pytest.mark.parametrize("estimator", [*PER_ROLLOUT, *PER_TOKEN])
def test_batch_without_any_action_token_is_answered(estimator: Any) -> None:
    x = estimator_inputs(
        rewards=[1.0, 0.0],
        lengths=[0, 0],
        values=[],
        greedy_rewards=[0.0, 0.0],
        parts={"a": [1.0, 0.0]},
    )
    assert estimate(estimator, x).advantages.shape == (0,)
