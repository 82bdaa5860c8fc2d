import pytest
from rlx_reasoning_gym import load, verify

from rlx import UsageError
from rlx.testing import reward_inputs

WORDS = {"min_word_len": 4, "max_word_len": 7}


def score(row, response):
    sample = reward_inputs(response=response, **row)
    return verify(sample).score


def test_rows_come_from_the_task_and_are_scored_by_it():
    rows = load(task="spell_backward", size=5, config=WORDS)
    assert len(rows) == 5
    for row in rows:
        assert row["label"] == row["word"][::-1]
        assert row["word"] in row["prompt"]
        assert score(row, row["label"]) == 1.0
        assert score(row, f"Well. <answer> {row['label']} </answer>") == 1.0
        assert score(row, "<answer>no</answer>") < 1.0


@pytest.mark.parametrize("task", ["word_sorting", "basic_arithmetic", "countdown", "sudoku"])
def test_any_task_will_do(task):
    for row in load(task=task, size=2):
        assert row["label"] is None or score(row, row["label"]) == 1.0


def test_splits_differ_and_repeat():
    train, test = (load(task="spell_backward", size=20, split=s) for s in ("train", "test"))
    assert train != test
    assert train == load(task="spell_backward", size=20)
    with pytest.raises(KeyError):
        load(task="spell_backward", split="other")


def test_mistakes_are_usage_errors():
    with pytest.raises(UsageError, match="not registered"):
        load(task="spell_backwards")
    with pytest.raises(UsageError, match="unexpected keyword"):
        load(task="spell_backward", config={"length": 3})


def test_reward_conforms(check_reward):
    check_reward(verify, examples=10)
