"""The built-in rewards without a data set: what they give, what they refuse."""

from __future__ import annotations

import re

import pytest

from rlx.core.errors import UsageError
from rlx.core.references import Bound, ComponentRef
from rlx.core.rewards import Reward, as_reward
from rlx.core.rollouts import FinishReason
from rlx.plugins.rewards.exact_match import exact_match
from rlx.plugins.rewards.overlong import overlong
from rlx.plugins.rewards.regex import regex
from rlx.plugins.rewards.repetition import repetition
from rlx.plugins.rewards.stop_properly import stop_properly
from rlx.testing import reward_inputs


def bound(name: str, **params: object) -> Bound:
    target = f"rlx.plugins.rewards.{name}:{name}"
    return ComponentRef(kind="rewards", name=name, target=target, params=params).resolve()


def test_exact_match_ignores_white_space_at_the_ends_only() -> None:
    assert exact_match(reward_inputs(response=" Paris\n", label="Paris")) == 1.0
    assert exact_match(reward_inputs(response="in Paris", label="Paris")) == 0.0
    assert exact_match(reward_inputs(response="42", label=42)) == 1.0
    assert exact_match(reward_inputs(response="paris", label="Paris")) == 0.0


def test_exact_match_options() -> None:
    sample = reward_inputs(response='Let me see.\n\n "new   york".', label="New York")
    assert exact_match(sample, ignore_case=True, last_line=True) == 0.0
    assert (
        exact_match(
            sample,
            ignore_case=True,
            last_line=True,
            ignore_whitespace=True,
            ignore_punctuation=True,
        )
        == 1.0
    )
    assert exact_match(reward_inputs(response="", label=""), last_line=True) == 1.0


def test_regex_searches_or_matches_in_full() -> None:
    thinking = r"<think>.*</think>\s*<answer>\d+</answer>"
    good = reward_inputs(response="<think>two\nlines</think>\n<answer>4</answer>\n")
    chatty = reward_inputs(response="Sure! <think>a</think><answer>4</answer> Anything else?")
    full = regex(pattern=thinking, mode="full")
    assert (full(good), full(chatty)) == (1.0, 0.0)
    search = regex(pattern=thinking, match=0.5, mismatch=-1.0)
    assert (search(chatty), search(reward_inputs(response="4"))) == (0.5, -1.0)
    assert regex(pattern="yes", ignore_case=True)(reward_inputs(response="YES")) == 1.0


def test_invalid_pattern_is_a_clear_error() -> None:
    with pytest.raises(UsageError, match=re.escape("'(' is not a regular expression")):
        bound("regex", pattern="(")


def test_overlong_is_the_soft_penalty_of_dapo() -> None:
    penalty = overlong(max_length=100, buffer=20)
    scores = [penalty(reward_inputs(tokens=n)) for n in (0, 80, 85, 90, 100, 250)]
    assert scores == pytest.approx([0.0, 0.0, -0.25, -0.5, -1.0, -1.0])
    assert overlong(max_length=100, buffer=20, factor=2.0)(reward_inputs(tokens=90)) == -1.0


def test_overlong_counts_action_tokens_not_text() -> None:
    sample = reward_inputs(response="tool output " * 500, tokens=5)
    assert overlong(max_length=10, buffer=4)(sample) == 0.0


def test_overlong_without_buffer_is_a_hard_limit() -> None:
    penalty = overlong(max_length=10, buffer=0)
    assert [penalty(reward_inputs(tokens=n)) for n in (10, 11)] == [0.0, -1.0]


@pytest.mark.parametrize(
    "params",
    [
        {"max_length": 10, "buffer": 11},
        {"max_length": 10, "buffer": -1},
        {"max_length": 0, "buffer": 0},
        {"max_length": 10, "buffer": 5, "factor": -1.0},
    ],
)
def test_overlong_refuses_lengths_that_make_no_sense(params: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="overlong"):
        bound("overlong", **params)


def test_repetition_is_the_share_of_repeated_ngrams() -> None:
    assert repetition(reward_inputs(response="a b c d e f")) == 0.0
    assert repetition(reward_inputs(response="a b A B a b"), n=2) == pytest.approx(-0.6)
    assert repetition(reward_inputs(response="la " * 102), n=3) == pytest.approx(-0.99)
    assert repetition(reward_inputs(response="la " * 102), max_penalty=-0.5) > -0.5
    assert repetition(reward_inputs(response="a b"), n=3) == 0.0


def test_repetition_of_tokens() -> None:
    sample = reward_inputs(response="words don't count here", tokens=[7, 7, 7])
    assert repetition(sample, n=1, unit="token") == pytest.approx(-2 / 3)


def test_repetition_refuses_a_positive_penalty() -> None:
    with pytest.raises(UsageError, match="max_penalty"):
        bound("repetition", max_penalty=1.0)


@pytest.mark.parametrize("reason", ["length", "abort", "max_turns", "max_tokens", "timeout"])
def test_stop_properly_penalises_whatever_was_cut_off(reason: FinishReason) -> None:
    assert stop_properly(reward_inputs(finish_reason=reason)) == -1.0
    assert stop_properly(reward_inputs(finish_reason="stop"), reward=0.25) == 0.25


def test_as_reward_takes_scalars_of_other_libraries() -> None:
    torch = pytest.importorskip("torch")
    np = pytest.importorskip("numpy")
    for value in (
        True,
        1,
        1.0,
        np.float32(1),
        np.bool_(True),
        torch.tensor(1.0),
        torch.tensor([1]),
    ):
        assert as_reward(value) == Reward(1.0)
    assert as_reward(None) == Reward(None)
    assert as_reward(Reward(np.float64(0.5), metrics={"n": np.int64(3)})) == Reward(
        0.5, metrics={"n": 3.0}
    )


@pytest.mark.parametrize("value", ["1", [1.0], {"score": 1.0}, 1j, Reward("1")])  # type: ignore[arg-type]
def test_as_reward_refuses_other_types(value: object) -> None:
    with pytest.raises(TypeError, match="a reward returns a number"):
        as_reward(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), Reward(1.0, {"a": float("-inf")})])
def test_as_reward_refuses_numbers_that_are_not_finite(value: object) -> None:
    with pytest.raises(ValueError, match="must be finite"):
        as_reward(value)
