"""Rows from samples: the best, pairs, conditioned; what is left out is counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from rlx.core import picks
from rlx.core.config import GenerateConfig
from rlx.core.picks import pick, picked, with_reward
from rlx.core.samples import Sample, SampledTask

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]


def sample(index: int, reward: float, response: str | None = None, **more: Any) -> Sample:
    text = f"answer {index}" if response is None else response
    values: dict[str, Any] = {"turns": 1, "finish_reason": "stop", "messages": [], **more}
    return Sample(
        index=index, response=text, reward=reward, parts={"right": reward}, tokens=3, **values
    )


def task(*samples: Sample, prompt: Any = "2 + 2?") -> SampledTask:
    return SampledTask(
        number=0, id="sums/0", source="sums", prompt=prompt, label="4", samples=list(samples)
    )


def responses(form: str, one: SampledTask, **settings: Any) -> list[Any]:
    found = pick(form, one, GenerateConfig(**settings))
    return [row["completion"] for row in found.rows]


def dropped(form: str, one: SampledTask, **settings: Any) -> Counter[str]:
    return +pick(form, one, GenerateConfig(**settings)).dropped


def test_best_takes_the_highest_rewards_and_the_first_of_equal_ones() -> None:
    one = task(sample(0, 0.2), sample(1, 0.9), sample(2, 0.9), sample(3, 0.5))
    assert responses("best", one) == ["answer 1"]
    assert responses("best", one, keep=3) == ["answer 1", "answer 2", "answer 3"]
    assert not dropped("best", one)


def test_best_of_equal_rewards_is_nothing_unless_the_reward_is_enough() -> None:
    one = task(sample(0, 1.0), sample(1, 1.0))
    assert responses("best", one) == []
    assert dropped("best", one) == {picks.EQUAL: 1}
    assert responses("best", one, min_reward=1.0) == ["answer 0"]
    assert dropped("best", one, min_reward=2.0) == {picks.LOW: 2}


def test_a_single_sample_is_the_best() -> None:
    assert responses("best", task(sample(0, 0.0))) == ["answer 0"]


def test_the_same_text_is_kept_once() -> None:
    one = task(sample(0, 0.9, "four"), sample(1, 0.8, "four"), sample(2, 0.1, "five"))
    assert responses("best", one, keep=2) == ["four", "five"]
    assert dropped("best", one, keep=2) == {picks.SAME_TEXT: 1}


def test_pairs_are_the_best_and_the_worst() -> None:
    one = task(sample(0, 0.5), sample(1, 0.1), sample(2, 0.9))
    (row,) = pick("pairs", one, GenerateConfig()).rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("2 + 2?", "answer 2", "answer 1")
    assert (row["chosen_reward"], row["rejected_reward"]) == (0.9, 0.1)


@pytest.mark.parametrize(
    ("rewards", "settings", "reason"),
    [
        ((0.5, 0.5, 0.5), {}, picks.EQUAL),
        ((0.5, 0.5, 0.5), {"min_margin": 0.2}, picks.EQUAL),
        ((0.5, 0.6, 0.5), {"min_margin": 0.2}, picks.SMALL_MARGIN),
        ((0.5,), {}, picks.TOO_FEW),
    ],
)
def test_tasks_without_a_pair_are_counted(
    rewards: tuple[float, ...], settings: dict[str, Any], reason: str
) -> None:
    one = task(*(sample(index, reward) for index, reward in enumerate(rewards)))
    assert pick("pairs", one, GenerateConfig(**settings)).rows == []
    assert dropped("pairs", one, **settings) == {reason: 1}


def test_a_margin_that_is_just_reached_is_enough() -> None:
    one = task(sample(0, 0.75), sample(1, 0.5))
    assert len(pick("pairs", one, GenerateConfig(min_margin=0.25)).rows) == 1


def test_samples_that_can_not_be_trained_on_are_left_out_of_all_but_all() -> None:
    one = task(
        sample(0, 0.0),
        sample(1, 0.3),
        sample(2, 1.0, finish_reason="length"),
        sample(3, 2.0, finish_reason="error"),
        sample(4, 3.0, turns=2),
    )
    reasons = {picks.CUT_OFF: 1, picks.FAILED: 1, picks.SEVERAL_TURNS: 1}
    for form in ("best", "pairs", "conditioned"):
        assert dropped(form, one) == reasons
    assert responses("best", one) == ["answer 1"]
    assert responses("best", one, truncated="keep") == ["answer 2"]
    assert len(responses("all", one)) == 5
    assert not dropped("all", one)


def test_a_task_whose_reward_failed_is_counted() -> None:
    for form in ("all", "best", "pairs", "conditioned"):
        assert pick(form, task(), GenerateConfig()).rows == []
        assert dropped(form, task())[picks.NO_SAMPLES] == 1


def test_chat_answers_are_messages_of_several_turns() -> None:
    turns = [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "4"},
    ]
    one = task(
        sample(0, 1.0, messages=turns, turns=2), sample(1, 0.0, messages=turns[:1]), prompt=CHAT
    )
    assert responses("best", one) == [turns]
    (row,) = pick("pairs", one, GenerateConfig()).rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == (CHAT, turns, turns[:1])


def test_the_reward_stands_in_the_prompt() -> None:
    one = task(sample(0, 0.25), sample(1, 1.0))
    rows = pick("conditioned", one, GenerateConfig()).rows
    assert [row["prompt"] for row in rows] == ["2 + 2?\nReward: 0.2", "2 + 2?\nReward: 1.0"]
    template = "[{reward:+.0f}] {prompt}"
    assert with_reward(CHAT, -1.0, template)[1] == {"role": "user", "content": "[-1] 2 + 2?"}
    assert with_reward(CHAT, -1.0, template)[0] == CHAT[0]
    assert CHAT[1]["content"] == "2 + 2?"


def test_what_is_left_out_is_summed_over_tasks() -> None:
    counted: Counter[str] = Counter()
    tasks = [task(sample(0, 1.0), sample(1, 1.0)), task(sample(0, 1.0), sample(1, 0.0))]
    rows = list(picked("pairs", iter(tasks), GenerateConfig(), counted))
    assert (len(rows), counted) == (1, {picks.EQUAL: 1})
