"""The task stream, and what the core makes of a sampler component."""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.calls import under_way
from rlx.core.errors import ComponentError, UsageError
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Group, Rollout, Task
from rlx.core.samplers import BoundSampler, Drop, TaskStream, oversample_error


def make_tasks(count: int, length: int = 3) -> list[Task]:
    return [
        Task(id=f"data/{i}", prompt="p", tokens=[1] * length, source=["even", "odd"][i % 2])
        for i in range(count)
    ]


def make_group(number: int, rewards: Sequence[float], task: Task | None = None) -> Group:
    task = task or make_tasks(number + 1)[number]
    rollouts = [
        Rollout(
            task=task,
            group_id=number,
            index=index,
            tokens=np.array([1, 2], dtype=np.int32),
            spans=(),
            logprobs=np.zeros(0, dtype=np.float32),
            text="",
            finish_reason="stop",
            reward=reward,
        )
        for index, reward in enumerate(rewards)
    ]
    return Group(id=number, task=task, rollouts=rollouts)


def bind(obj: Any, **params: Any) -> Bound:
    ref = ComponentRef(kind="samplers", name="probe", target="test:probe")
    return Bound(ref=ref, obj=obj, params=params)


def ids(tasks: Sequence[Task]) -> list[str]:
    return [task.id for task in tasks]


@given(
    count=st.integers(1, 12),
    seed=st.integers(0, 2**40),
    draws=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    cut=st.integers(0, 8),
    shuffle=st.booleans(),
)
def test_a_resumed_stream_goes_on_where_it_stopped(
    count: int, seed: int, draws: list[int], cut: int, shuffle: bool
) -> None:
    tasks = make_tasks(count)
    whole = TaskStream(tasks, seed, shuffle=shuffle)
    expected = [ids(whole.next(n)) for n in draws]
    first = TaskStream(tasks, seed, shuffle=shuffle)
    found = [ids(first.next(n)) for n in draws[:cut]]
    second = TaskStream(tasks, seed, shuffle=shuffle)
    second.load_state_dict(pickle.loads(pickle.dumps(first.state_dict())))
    assert found + [ids(second.next(n)) for n in draws[cut:]] == expected


@given(count=st.integers(1, 20), seed=st.integers(0, 2**32), epochs=st.integers(1, 4))
def test_every_epoch_has_every_task_once(count: int, seed: int, epochs: int) -> None:
    stream = TaskStream(make_tasks(count), seed)
    drawn = ids(stream.next(count * epochs))
    for epoch in range(epochs):
        assert len(set(drawn[epoch * count : (epoch + 1) * count])) == count
    assert stream.epoch == epochs


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    tasks = make_tasks(50)
    stream, other = TaskStream(tasks, 1), TaskStream(tasks, 2)
    first, second = ids(stream.next(50)), ids(stream.next(50))
    assert first != second
    assert first != ids(other.next(50))


def test_without_shuffle_the_order_is_the_datas() -> None:
    stream = TaskStream(make_tasks(3), 0, shuffle=False)
    assert ids(stream.next(4)) == ["data/0", "data/1", "data/2", "data/0"]


def test_a_stream_over_other_data_is_refused() -> None:
    state = TaskStream(make_tasks(3), 0).state_dict()
    with pytest.raises(UsageError, match="made with 3 tasks, the data now has 4"):
        TaskStream(make_tasks(4), 0).load_state_dict(state)


def any_right(group: Group, *, least: float = 0.5) -> bool | Drop:
    return True if max(group.rewards) > least else Drop("none right")


def test_a_function_keeps_or_drops_and_is_counted_by_source() -> None:
    sampler = BoundSampler(bind(any_right, least=0.2), make_tasks(4), 0)
    assert sampler.keep(make_group(0, [0.3])) is None
    assert sampler.keep(make_group(1, [0.1])) == Drop("none right")
    assert sampler.keep(make_group(2, [0.1])) == Drop("none right")
    assert sampler.drop_reasons == {"none right": 2}
    assert sampler.metrics() == {
        "sampler/kept": 1.0,
        "sampler/dropped": 2.0,
        "sampler/pass_rate/even": 0.5,
        "sampler/pass_rate/odd": 0.0,
    }
    assert sampler.metrics() == {"sampler/kept": 0.0, "sampler/dropped": 0.0}


class Recorder:
    """A class form with everything."""

    max_oversample = 3.0

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.place = 0

    def bind(self, tasks: Sequence[Task], seed: int) -> None:
        self.tasks, self.seed = tasks, seed

    def next_tasks(self, n: int) -> list[Task]:
        self.place += 1
        return [self.tasks[(self.seed + self.place) % len(self.tasks)]]

    def keep(self, group: Group) -> bool:
        return group.rewards[0] > 0

    def update(self, groups: Sequence[Group]) -> None:
        self.seen += [group.id for group in groups]

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.place = state["seen"], state["place"]


def test_a_class_chooses_tasks_and_learns_from_groups_in_order() -> None:
    bound = bind(Recorder)
    sampler = BoundSampler(bound, make_tasks(3), 10)
    assert ids(sampler.next_tasks(4)) == ["data/2", "data/0", "data/1", "data/2"]
    sampler.update([make_group(2, [1.0]), make_group(1, [0.0])])
    assert bound.instance.seen == [1, 2]
    assert sampler.max_oversample == 3.0
    fresh_bound = bind(Recorder)
    fresh = BoundSampler(fresh_bound, make_tasks(3), 10)
    fresh.load_state_dict(sampler.state_dict())
    assert fresh_bound.instance.seen == [1, 2]
    assert ids(fresh.next_tasks(2)) == ids(sampler.next_tasks(2))


class LongTasks(list[Task]):
    max_prompt_tokens = 5


def test_prompts_that_are_too_long_are_passed_over_and_counted() -> None:
    tasks = LongTasks([*make_tasks(3, length=9), *make_tasks(2, length=5)])
    sampler = BoundSampler(bind(any_right), tasks, 0)
    assert all(len(task.tokens) == 5 for task in sampler.next_tasks(4))
    assert sampler.skipped_too_long > 0
    assert sampler.metrics()["sampler/skipped_too_long"] == sampler.skipped_too_long


def test_nothing_but_long_prompts_is_an_error_and_no_endless_loop() -> None:
    sampler = BoundSampler(bind(any_right), LongTasks(make_tasks(3, length=9)), 0)
    with pytest.raises(UsageError, match="longer than the 5 tokens that fit"):
        sampler.next_tasks(2)


def answers_text(group: Group) -> str:
    return "yes"


def raises(group: Group) -> bool:
    raise ValueError("boom")


class GivesNothing:
    def next_tasks(self, n: int) -> list[Task]:
        return []


class Yields:
    """Its body runs only when somebody iterates."""

    def next_tasks(self, n: int) -> Iterator[Task]:
        call = under_way(threading.get_ident())
        assert call is not None
        assert call.who.endswith("in next_tasks()")
        yield from make_tasks(1)
        raise ValueError("no more")


def test_tasks_of_a_generator_are_drawn_as_a_part_of_the_samplers_call() -> None:
    with pytest.raises(ComponentError, match="failed in next_tasks: ValueError: no more"):
        BoundSampler(bind(Yields), make_tasks(1), 0).next_tasks(2)


def test_component_failures_name_the_sampler() -> None:
    group = make_group(0, [1.0])
    with pytest.raises(ComponentError, match="answered 'yes' for a group"):
        BoundSampler(bind(answers_text), make_tasks(1), 0).keep(group)
    with pytest.raises(ComponentError, match="'probe' failed in keep: ValueError: boom"):
        BoundSampler(bind(raises), make_tasks(1), 0).keep(group)
    with pytest.raises(ComponentError, match=r"next_tasks\(2\) gave 0 items"):
        BoundSampler(bind(GivesNothing), make_tasks(1), 0).next_tasks(2)
    assert BoundSampler(bind(GivesNothing), make_tasks(1), 0).keep(group) is None


def test_the_oversampling_error_says_how_much_passes_and_why() -> None:
    sampler = BoundSampler(bind(any_right), make_tasks(4), 0)
    verdicts = Counter(sampler.keep(make_group(i, [float(i == 0)])) for i in range(4))
    assert verdicts[None] == 1
    message = str(oversample_error(sampler, wanted=8, dispatched=4, accepted=1))
    assert "kept 1 of 4 groups, a pass rate of 25.0%, where a batch needs 8" in message
    assert "3 dropped: none right" in message
    assert "sampler.max_oversample" in message
