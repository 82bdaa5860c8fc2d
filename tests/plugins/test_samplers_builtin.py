"""The built-in samplers."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlx.core.errors import ComponentError, UsageError
from rlx.core.rollouts import Group, Rollout, Task
from rlx.core.samplers import Drop
from rlx.plugins.samplers.curriculum import Curriculum
from rlx.plugins.samplers.dynamic import Dynamic
from rlx.plugins.samplers.uniform import Uniform


def make_task(number: int) -> Task:
    return Task(id=f"data/{number}", prompt="p", tokens=[1])


def make_group(rewards: Sequence[float], number: int = 0) -> Group:
    rollouts = [
        Rollout(
            task=make_task(number),
            group_id=number,
            index=index,
            tokens=np.array([1], dtype=np.int32),
            spans=(),
            logprobs=np.zeros(0, dtype=np.float32),
            text="",
            finish_reason="stop",
            reward=reward,
            parts={"math": 1.0 - reward},
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id=number, task=make_task(number), rollouts=rollouts)


def test_uniform_keeps_every_group() -> None:
    assert Uniform().keep(make_group([0.0, 0.0]))


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([0.0, 0.0], Drop("all rewards equal")),
        ([1.0, 1.0], Drop("all rewards equal")),
        ([0.5, 0.5], Drop("all rewards equal")),
        ([-1.0, 1.0], Drop("mean reward at or below 0")),
        ([-1.0, 0.5], Drop("mean reward at or below 0")),
        ([0.5, 1.5], Drop("mean reward at or above 1")),
    ],
)
def test_dynamic_keeps_groups_with_something_to_tell_apart(
    rewards: list[float], expected: bool | Drop
) -> None:
    assert Dynamic().keep(make_group(rewards)) == expected


def test_dynamic_bounds_can_be_moved_and_switched_off() -> None:
    assert Dynamic(low=0.2, high=0.8).keep(make_group([0.0, 0.4])) == Drop(
        "mean reward at or below 0.2"
    )
    assert Dynamic(low=-math.inf, high=math.inf).keep(make_group([-5.0, 5.0])) is True


def test_dynamic_can_look_at_one_part() -> None:
    assert Dynamic(part="math").keep(make_group([0.1, 0.3])) is True
    with pytest.raises(ComponentError, match="no reward part 'mth'"):
        Dynamic(part="mth").keep(make_group([0.1, 0.3]))


def test_dynamic_refuses_an_empty_interval() -> None:
    with pytest.raises(UsageError, match="is not below"):
        Dynamic(low=1.0, high=0.0)


def drive(sampler: Curriculum, rates: dict[str, float], rounds: int) -> Counter[str]:
    drawn: Counter[str] = Counter()
    for _ in range(rounds):
        tasks = sampler.next_tasks(4)
        assert len({task.id for task in tasks}) == len(tasks)
        drawn.update(task.id for task in tasks)
        sampler.update(
            [
                replace(make_group([rates[task.id]] * 4), task=task, id=i)
                for i, task in enumerate(tasks)
            ]
        )
    return drawn


def test_curriculum_prefers_tasks_near_the_target() -> None:
    tasks = [make_task(i) for i in range(30)]
    rates = {task.id: (0.0, 0.5, 1.0)[i % 3] for i, task in enumerate(tasks)}
    sampler = Curriculum()
    sampler.bind(tasks, 0)
    drawn = drive(sampler, rates, 200)
    near = sum(count for name, count in drawn.items() if rates[name] == 0.5)
    assert set(drawn) == set(rates)  # every task is tried
    assert near / drawn.total() > 0.6  # a third of the tasks


def test_curriculum_resumes_exactly() -> None:
    tasks = [make_task(i) for i in range(30)]
    rates = {task.id: i / 30 for i, task in enumerate(tasks)}
    first, second = Curriculum(), Curriculum()
    first.bind(tasks, 3)
    second.bind(tasks, 3)
    drive(first, rates, 20)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert drive(second, rates, 20) == drive(first, rates, 20)
    third = Curriculum()
    third.bind(tasks[:3], 0)
    with pytest.raises(UsageError, match="over 30 tasks"):
        third.load_state_dict(first.state_dict())


def test_curriculum_gives_what_there_is() -> None:
    sampler = Curriculum()
    sampler.bind([make_task(0), make_task(1)], 0)
    assert len(sampler.next_tasks(5)) == 2
