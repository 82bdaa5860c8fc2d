"""pass@k, summaries of sources, and what is written of an evaluation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.evaluation import (
    Scoring,
    evaluated,
    metric_names,
    pass_at_k,
    powers_of_two,
    summarise,
)
from rlx.core.rollouts import FinishReason, Group, Rollout, Span, Task


@given(n=st.integers(1, 8), data=st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_pass(n: int, data: st.DataObject) -> None:
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    outcomes = [True] * c + [False] * (n - c)
    draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
    assert pass_at_k(n, c, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    p, n, k = 0.2, 8, 4
    counts = np.random.default_rng(0).binomial(n, p, size=40_000)
    mean = np.mean([pass_at_k(n, int(c), k) for c in counts])
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=0.005)


def test_pass_at_k_of_large_n_is_exact() -> None:
    assert pass_at_k(4096, 1, 1024) == pytest.approx(0.25, abs=1e-15)
    assert pass_at_k(4096, 0, 4096) == 0.0
    assert pass_at_k(4096, 4000, 128) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_nonsense(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(n, c, k)


def test_powers_of_two() -> None:
    assert [powers_of_two(n) for n in (1, 2, 5, 8)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]


def rollout(
    parts: Mapping[str, float],
    *,
    reward: float = 0.0,
    length: int = 2,
    finish: FinishReason = "stop",
    task: str = "s/0",
    index: int = 0,
    turn_reward: float = 0.0,
) -> Rollout:
    return Rollout(
        task=Task(id=task, prompt="p", tokens=[1], source="s", label="L"),
        group_id=0,
        index=index,
        tokens=np.zeros(1 + length, dtype=np.int32),
        spans=[Span(start=1, stop=1 + length, version=0, finish_reason=finish, reward=turn_reward)],
        logprobs=np.zeros(length, dtype=np.float32),
        text="t",
        finish_reason=finish,
        reward=reward,
        parts=parts,
    )


def group(scores: Sequence[float | None], **more: object) -> Group:
    rollouts = [
        rollout({} if score is None else {"math": score}, index=index, **more)  # type: ignore[arg-type]
        for index, score in enumerate(scores)
    ]
    return Group(id=0, task=rollouts[0].task, rollouts=rollouts)


MATH = Scoring(part="math")


def test_a_source_is_averaged_over_tasks() -> None:
    found = summarise([group([1, 0, 0, 0]), group([1, 1, 1, 0])], samples=4, scoring=MATH)
    assert (found.tasks, found.rollouts, found.failed) == (2, 8, 0)
    assert found.mean == 0.5
    assert found.pass_at == pytest.approx({1: 0.5, 2: 0.75, 4: 1.0})
    assert found.mean_stderr == pytest.approx(np.std([0.25, 0.75], ddof=1) / np.sqrt(2))


def test_pass_at_1_is_the_mean_of_passes() -> None:
    rng = np.random.default_rng(0)
    groups = [group([float(x) for x in rng.random(5)]) for _ in range(7)]
    found = summarise(groups, samples=5, scoring=Scoring(part="math", threshold=0.5))
    passes = [score >= 0.5 for g in groups for r in g.rollouts for score in r.parts.values()]
    assert found.pass_at[1] == pytest.approx(np.mean(passes))


def test_rollouts_to_which_the_reward_does_not_apply_are_left_out() -> None:
    found = summarise([group([1, None]), group([None, None])], samples=2, scoring=MATH, dropped=3)
    assert (found.tasks, found.failed, found.mean) == (1, 4, 1.0)
    assert found.pass_at[1] == 1.0
    assert math.isnan(found.pass_at[2])  # no task has two scored rollouts


def test_length_and_truncation() -> None:
    found = summarise(
        [group([1], length=4), group([0], length=8, finish="length")], samples=1, scoring=MATH
    )
    assert (found.length_mean, found.truncated_rate) == (6.0, 0.5)


def test_the_total_counts_turns_and_weights() -> None:
    one = rollout({"math": 1.0}, reward=0.25, turn_reward=0.5)
    assert Scoring(part="total").score(one) == 0.75
    assert Scoring(part="math").score(one) == 1.0


def test_no_group_gives_no_number() -> None:
    found = summarise([], samples=2, scoring=MATH, dropped=2)
    assert (found.tasks, found.failed) == (0, 2)
    assert math.isnan(found.mean)
    assert math.isnan(found.pass_at[1])


def test_metrics_have_the_documented_names() -> None:
    groups = {"a": [group([1, 0])], "b": [None, group([0, 0])]}
    found = evaluated(groups, samples=2, scoring=MATH, failed_rewards=2, seconds=0.1)
    assert found.metrics == {
        "eval/failed": 2.0,
        "eval/a/mean": 0.5,
        "eval/a/pass@1": 0.5,
        "eval/a/pass@2": 1.0,
        "eval/a/length_mean": 2.0,
        "eval/a/truncated_rate": 0.0,
        "eval/b/mean": 0.0,
        "eval/b/pass@1": 0.0,
        "eval/b/pass@2": 0.0,
        "eval/b/length_mean": 2.0,
        "eval/b/truncated_rate": 0.0,
    }
    assert found.sources["b"].failed == 1
    assert set(metric_names(["a"], 2)) < set(found.metrics)


def test_several_rewards_have_their_means() -> None:
    both = Group(id=0, task=rollout({}).task, rollouts=[rollout({"math": 1.0, "style": 0.5})])
    found = summarise([both], samples=1, scoring=MATH)
    assert found.metrics("eval/s")["eval/s/reward/style"] == 0.5


def test_records_say_what_passed() -> None:
    found = evaluated(
        {"s": [group([1.0, 0.0])]}, samples=2, scoring=MATH, failed_rewards=0, seconds=0
    )
    first, second = found.records()
    assert (first["source"], first["task"], first["index"]) == ("s", "s/0", 0)
    assert [record["passed"] for record in (first, second)] == [True, False]
    assert (first["response"], first["label"], first["tokens"]) == ("t", "L", 2)
