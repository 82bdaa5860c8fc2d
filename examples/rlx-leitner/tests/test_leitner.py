from collections import Counter
from itertools import pairwise

from rlx_leitner.reward import Fresh, answer
from rlx_leitner.sampler import Leitner

from rlx import Task
from rlx.testing import group_inputs


def test_sampler_conforms(check_sampler):
    check_sampler(Leitner)
    check_sampler(Leitner, promote=0.25, boxes=2)


def test_reward_conforms(check_reward):
    check_reward(Fresh)
    check_reward(Fresh, penalty=0.0, most=1)


def tasks(count: int) -> list[Task]:
    return [Task(id=f"data/{i}", prompt="", tokens=(1,)) for i in range(count)]


def rounds(sampler: Leitner, count: int, solves) -> list[list[str]]:
    """Let the sampler choose two tasks a round and tell it who was solved."""
    seen = []
    for _ in range(count):
        chosen = sampler.next_tasks(2)
        sampler.update([group_inputs(rewards=[solves(task)], task_id=task.id) for task in chosen])
        seen.append([task.id for task in chosen])
    return seen


def test_failed_task_comes_back_soon_and_solved_ones_later_and_later():
    sampler = Leitner()
    sampler.bind(tasks(12), seed=0)
    hard, easy = sampler._order[:2]
    seen = rounds(sampler, 24, lambda task: task.id != hard)
    visits = [number for number, names in enumerate(seen) if easy in names]
    gaps = [later - earlier for earlier, later in pairwise(visits)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0]
    counts = Counter(name for names in seen for name in names)
    assert counts.most_common(1)[0][0] == hard


def test_half_of_a_round_is_new_as_long_as_there_is_something_new():
    sampler = Leitner()
    sampler.bind(tasks(5), seed=1)
    known: set[str] = set()
    new = []
    for names in rounds(sampler, 4, lambda task: False):
        new.append(len({*names} - known))
        known |= {*names}
    assert new == [2, 1, 1, 1]


def test_wrong_answer_is_worth_less_each_time(reward_inputs):
    fresh = Fresh(penalty=0.5, most=2)
    samples = [
        reward_inputs(response=text, label="4", task_id="t", index=index)
        for index, text in enumerate(["so 4", "so 5", "5"])
    ]
    for wrong in (0.0, -0.5, -1.0, -1.0):
        assert [reward.score for reward in fresh(samples)] == [1.0, wrong, wrong]
    elsewhere = reward_inputs(response="5", label="4", task_id="u")
    assert [reward.score for reward in fresh([elsewhere])] == [0.0]


def test_memory_goes_on_after_a_checkpoint(reward_inputs):
    sample = reward_inputs(response="5", label="4", task_id="t")
    before, after = Fresh(), Fresh()
    before([sample])
    after.load_state_dict(before.state_dict())
    assert after([sample])[0].metrics == {"repeats": 1.0}
    assert answer("no number") == "no number"
