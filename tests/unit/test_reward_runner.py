"""The reward runner: scopes, weights, time-outs, failures, replacement of workers."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.core.config import RewardPolicy
from rlx.core.engine.reward_compose import part_names
from rlx.core.engine.rewards import RewardRunner, RewardWorker
from rlx.core.errors import ComponentError, EngineError
from rlx.core.references import ComponentRef
from rlx.core.rollouts import Rollout, Span, Task
from rlx.testing import reward_inputs

FUNCTIONS = """
import asyncio, re, sys, threading, time
from rlx.core.component import component
from rlx.core.rewards import Reward

release = threading.Event()
threads = set()
calls = []
attempts = []
running = peak = 0
lock = threading.Lock()

def length(sample):
    threads.add(threading.get_ident())
    return len(sample.response)

def scaled(sample, *, factor: float = 1.0):
    return len(sample.response) * factor

async def later(sample):
    await asyncio.sleep(0.01)
    return len(sample.response)

async def never(sample):
    await asyncio.sleep(60)

def rich(sample):
    return Reward(0.5, parts={"format": 1.0}, metrics={"words": 3})

def broken(sample):
    raise KeyError("no such column")

def broken_on_bad(sample):
    if sample.response == "bad":
        raise ValueError("it is bad")
    return 1.0

def quits(sample):
    sys.exit(3)

def hangs(sample):
    release.wait(60)
    return 1.0

def hangs_on_bad(sample):
    return hangs(sample) if sample.response == "bad" else 1.0

class Novel:
    def __init__(self):
        self.seen = []

    def __call__(self, sample):
        new = sample.response not in self.seen
        self.seen.append(sample.response)
        return float(new)

    def state_dict(self):
        return {"seen": list(self.seen)}

    def load_state_dict(self, state):
        self.seen = list(state["seen"])

def text(sample):
    return "0.5"

def nan(sample):
    return float("nan")

def forgot(sample):
    len(sample.response)

def only_long(sample):
    return 1.0 if len(sample.response) > 3 else None

def timeout_error(sample):
    raise TimeoutError("the judge was slow")

def flaky(sample):
    attempts.append(time.monotonic())
    if len(attempts) < 3:
        raise ConnectionError("try again")
    return 1.0

def slow(sample):
    global running, peak
    with lock:
        running += 1
        peak = max(peak, running)
    time.sleep(0.05)
    with lock:
        running -= 1
    return 1.0

def hidden_async(sample):
    return later(sample)

@component(needs_label=True)
def labelled(sample):
    return 1.0

@component(scope="group")
def rank(samples):
    calls.append([s.response for s in samples])
    order = sorted(s.response for s in samples)
    return [order.index(s.response) for s in samples]

@component(scope="batch")
def batch(samples):
    calls.append(len(samples))
    return [1.0] * len(samples)

@component(scope="group")
def one_for_all(samples):
    return 1.0

@component(scope="group")
async def group_later(samples):
    return [float(len(samples))] * len(samples)

class Counting:
    def __init__(self, *, start: int = 0):
        self.count = start
    def __call__(self, sample):
        self.count += 1
        return self.count
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module above, imported anew; what hangs in it is released at the end."""
    (tmp_path / "reward_functions.py").write_text(textwrap.dedent(FUNCTIONS))
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("reward_functions", None)
    import reward_functions

    yield reward_functions
    reward_functions.release.set()


def reference(name: str, **params: Any) -> ComponentRef:
    return ComponentRef(kind="rewards", name=name, target=f"reward_functions:{name}", params=params)


def rollout(response: str, *, group: int = 0, index: int = 0, label: Any = "1") -> Rollout:
    task = Task(id=f"data/{group}", prompt="say it", tokens=[1, 2], label=label)
    length = len(response) + 2
    return Rollout(
        task=task,
        group_id=group,
        index=index,
        tokens=np.arange(length, dtype=np.int32),
        spans=[Span(start=2, stop=length, version=0, finish_reason="stop")],
        logprobs=np.zeros(len(response), np.float32),
        text=response,
        finish_reason="stop",
        metrics={"agent/steps": 1.0},
    )


def group(*responses: str, number: int = 0) -> list[Rollout]:
    return [rollout(text, group=number, index=i) for i, text in enumerate(responses)]


class Local:
    """A handle on a worker in this process that counts its calls."""

    def __init__(self, worker: RewardWorker) -> None:
        self.worker = worker
        self.scored: list[int] = []

    async def call(self, method: str, *args: Any) -> Any:
        if method == "score":
            self.scored.append(len(args[0]))
            return await self.worker.score(*args)
        return getattr(self.worker, method)(*args)


def make_runner(
    *rewards: str | tuple[ComponentRef, float],
    workers: int = 1,
    replace: Any = None,
    retries: int = 0,
    **policy: Any,
) -> RewardRunner:
    pairs = [(reference(r), 1.0) if isinstance(r, str) else r for r in rewards]
    settings = RewardPolicy(**{"timeout": 5.0, **policy})
    handles = []
    for _ in range(workers):
        worker = RewardWorker(pairs, settings.concurrency, settings.timeout, retries)
        worker.start()
        handles.append(Local(worker))
    return RewardRunner(handles, pairs, settings, replace=replace)


def score(runner: RewardRunner, rollouts: Sequence[Rollout]) -> list[Rollout] | None:
    return asyncio.run(runner.score_group(rollouts))


def error_of(runner: RewardRunner, rollouts: Sequence[Rollout]) -> str:
    with pytest.raises(ComponentError) as caught:
        score(runner, rollouts)
    return str(caught.value)


def test_rollouts_come_back_in_order_with_reward_and_parts(functions: Any) -> None:
    scored = score(make_runner("length"), group("a", "bbb", "cc"))
    assert scored is not None
    assert [r.reward for r in scored] == [1.0, 3.0, 2.0]
    assert [dict(r.parts) for r in scored] == [{"length": 1.0}, {"length": 3.0}, {"length": 2.0}]
    assert [r.index for r in scored] == [0, 1, 2]
    assert scored[0].metrics == {"agent/steps": 1.0}


def test_synchronous_rewards_run_off_the_event_loop(functions: Any) -> None:
    score(make_runner("length"), group("a", "b"))
    assert threading.get_ident() not in functions.threads


def test_weighted_sum_of_parts_is_clipped_after_weighting(functions: Any) -> None:
    runner = make_runner(
        (reference("length"), 2.0), (reference("scaled", factor=-1.0), 0.5), clip=4.0
    )
    scored = score(runner, group("aa", "a" * 100))
    assert scored is not None
    assert [r.reward for r in scored] == [3.0, 4.0]
    assert dict(scored[1].parts) == {"length": 100.0, "scaled": -100.0}
    assert runner.weights == {"length": 2.0, "scaled": 0.5}


def test_no_clip_leaves_large_rewards_alone(functions: Any) -> None:
    scored = score(make_runner("length", clip=None), group("a" * 100))
    assert scored is not None
    assert scored[0].reward == 100.0


def test_same_reward_twice_gets_two_part_names(functions: Any) -> None:
    pairs = [(reference("scaled"), 1.0), (reference("scaled", factor=2.0), 1.0)]
    scored = score(make_runner(*pairs), group("aa"))
    assert scored is not None
    assert dict(scored[0].parts) == {"scaled": 2.0, "scaled_2": 4.0}


def test_part_names_never_shadow_the_core_metrics() -> None:
    assert part_names(["mean", "file.py:mean", "dist/failed"]) == ["mean_2", "mean_3", "failed_2"]


def test_reward_object_keeps_its_parts_and_metrics_apart_from_the_score(functions: Any) -> None:
    scored = score(make_runner("rich"), group("a"))
    assert scored is not None
    assert scored[0].reward == 0.5
    assert dict(scored[0].parts) == {"rich": 0.5}
    assert scored[0].metrics == {"agent/steps": 1.0, "reward/rich/format": 1.0, "rich/words": 3.0}


@pytest.mark.parametrize("name", ["later", "hidden_async"])
def test_asynchronous_rewards_are_awaited(functions: Any, name: str) -> None:
    scored = score(make_runner(name), group("a", "bb"))
    assert scored is not None
    assert [r.reward for r in scored] == [1.0, 2.0]


def test_group_scope_gets_whole_groups_even_when_they_travel_together(functions: Any) -> None:
    runner = make_runner("rank")

    async def both() -> Sequence[list[Rollout] | None]:
        return await asyncio.gather(
            runner.score_group(group("b", "a", number=0)),
            runner.score_group(group("x", "z", "y", number=1)),
        )

    first, second = asyncio.run(both())
    assert sorted(functions.calls) == [["b", "a"], ["x", "z", "y"]]
    assert [r.reward for r in first or []] == [1.0, 0.0]
    assert [r.reward for r in second or []] == [0.0, 2.0, 1.0]


def test_asynchronous_group_reward(functions: Any) -> None:
    scored = score(make_runner("group_later"), group("a", "b", "c"))
    assert scored is not None
    assert [r.reward for r in scored] == [3.0, 3.0, 3.0]


def test_groups_of_one_tick_travel_in_one_call_per_worker(functions: Any) -> None:
    runner = make_runner("batch", workers=2)

    async def many() -> None:
        await asyncio.gather(*(runner.score_group(group("a", "b", number=i)) for i in range(6)))

    asyncio.run(many())
    handles = runner._workers
    assert [handle.scored for handle in handles] == [[6], [6]]  # type: ignore[attr-defined]
    assert functions.calls == [6, 6]


def test_at_most_concurrency_calls_run_at_once(functions: Any) -> None:
    score(make_runner("slow", concurrency=3), group(*"abcdefghi"))
    assert functions.peak == 3


def test_a_call_waiting_for_a_free_slot_does_not_time_out(functions: Any) -> None:
    scored = score(make_runner("slow", concurrency=1, timeout=0.3), group(*"abcdefghij"))
    assert scored is not None  # 0.5 s in all, 0.05 s each


def test_failure_names_reward_sample_and_the_line_that_raised(functions: Any) -> None:
    message = error_of(make_runner("broken"), group("the answer", "other"))
    assert "reward 'broken' raised KeyError: 'no such column'" in message
    assert "task data/0, rollout 0 of group 0" in message
    assert "response: the answer" in message
    assert 'raise KeyError("no such column")' in message
    assert "(1 more in this group)" in message
    assert "core/threads.py" not in message, "the core's own frames help nobody"


def test_only_the_failing_sample_is_blamed(functions: Any) -> None:
    message = error_of(make_runner("broken_on_bad"), group("good", "bad"))
    assert "rollout 1 of group 0" in message
    assert "more in this group" not in message


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("text", "its value is str '0.5'"),
        ("nan", "its value is nan"),
        ("forgot", "no reward applies to this sample: forgot returned None"),
        ("one_for_all", "has scope='group', so it returns a list"),
        ("quits", "raised SystemExit: 3"),
        ("timeout_error", "raised TimeoutError: the judge was slow"),
    ],
)
def test_what_is_no_reward_is_an_error(functions: Any, name: str, expected: str) -> None:
    assert expected in error_of(make_runner(name), group("some response"))


def test_missing_label_is_an_error_for_rewards_that_need_one(functions: Any) -> None:
    message = error_of(make_runner("labelled"), [rollout("a", label=None)])
    assert "reward 'labelled' needs a label, and the task has none" in message


def test_none_leaves_the_reward_out_when_another_one_applies(functions: Any) -> None:
    runner = make_runner("only_long", "length")
    scored = score(runner, group("aa", "aaaa"))
    assert scored is not None
    assert [dict(r.parts) for r in scored] == [{"length": 2.0}, {"only_long": 1.0, "length": 4.0}]
    assert runner.take_metrics() == {"reward/failed": 0.0}


def test_dropping_policy_drops_the_group_and_counts_it(functions: Any) -> None:
    runner = make_runner("broken_on_bad", failure="drop_group")
    assert score(runner, group("good", "bad")) is None
    assert score(runner, group("good", "fine")) is not None
    assert runner.take_metrics() == {"reward/failed": 1.0, "reward/dropped_groups": 1.0}
    assert runner.take_metrics() == {"reward/failed": 0.0, "reward/dropped_groups": 0.0}


def test_default_policy_gives_the_default_and_counts_it(functions: Any) -> None:
    runner = make_runner(
        (reference("broken_on_bad"), 2.0),
        (reference("length"), 1.0),
        failure="default",
        default=-1.0,
    )
    scored = score(runner, group("good", "bad"))
    assert scored is not None
    assert [r.reward for r in scored] == [6.0, 1.0]
    assert runner.take_metrics() == {"reward/failed": 1.0}


@pytest.mark.parametrize("name", ["hangs", "never"])
def test_a_reward_that_hangs_times_out(functions: Any, name: str) -> None:
    start = time.monotonic()
    message = error_of(make_runner(name, timeout=0.2), group("a"))
    assert f"reward '{name}' did not return within 0.2 s" in message
    assert time.monotonic() - start < 5


def test_the_run_goes_on_beside_hanging_threads(functions: Any) -> None:
    runner = make_runner("hangs_on_bad", timeout=0.2, concurrency=2, failure="default")
    for _ in range(3):  # six hanging calls, three times as many as there are slots
        score(runner, group("bad", "bad"))
    worker = runner._workers[0].worker  # type: ignore[attr-defined]
    assert worker.stuck() == 6
    scored = score(runner, group("good", "fine"))
    assert [r.reward for r in scored or []] == [1.0, 1.0]
    functions.release.set()
    deadline = time.monotonic() + 5
    while worker.stuck() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.stuck() == 0, "threads that return after all are not stuck any more"


def test_too_many_hanging_calls_end_the_run_where_nobody_replaces_the_worker(
    functions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.core.engine.reward_worker._STUCK_LIMIT", 3)
    runner = make_runner("hangs", timeout=0.1, concurrency=2, failure="default")
    score(runner, group("a", "b", "c"))
    with pytest.raises(EngineError, match="3 calls of rewards hang"):
        score(runner, group("d"))


def test_worker_full_of_hanging_threads_is_replaced(functions: Any) -> None:
    pairs = [(reference("hangs_on_bad"), 1.0)]
    replaced: list[int] = []

    async def replace(index: int, why: str) -> Local:
        replaced.append(index)
        worker = RewardWorker(pairs, 2, 0.2)
        worker.start()
        return Local(worker)

    runner = make_runner(*pairs, replace=replace, timeout=0.2, concurrency=2, failure="default")
    score(runner, group("bad", "good"))
    assert replaced == []
    score(runner, group("bad", "good"))
    assert replaced == [0]
    assert runner._workers[0].worker.stuck() == 0  # type: ignore[attr-defined]
    assert runner.take_metrics() == {"reward/failed": 2.0, "reward/workers_replaced": 1.0}


class Mortal(Local):
    """A worker that dies, as a segmentation fault would have it, of the response "deadly"."""

    async def call(self, method: str, *args: Any) -> Any:
        if method == "score" and any(sample.response == "deadly" for sample in args[0]):
            raise EngineError("the actor died")
        return await super().call(method, *args)


def mortal_runner(**policy: Any) -> tuple[RewardRunner, list[int]]:
    pairs = [(reference("length"), 1.0)]
    replaced: list[int] = []

    def new() -> Mortal:
        worker = RewardWorker(pairs, 2, 5.0)
        worker.start()
        return Mortal(worker)

    async def replace(index: int, why: str) -> Mortal:
        replaced.append(index)
        return new()

    settings = RewardPolicy(timeout=5.0, **policy)
    return RewardRunner([new()], pairs, settings, replace=replace), replaced


def test_only_the_group_that_kills_workers_fails(functions: Any) -> None:
    runner, replaced = mortal_runner(failure="drop_group")

    async def three() -> Sequence[list[Rollout] | None]:
        return await asyncio.gather(
            runner.score_group(group("a", "bb", number=0)),
            runner.score_group(group("c", "deadly", number=1)),
            runner.score_group(group("ddd", "e", number=2)),
        )

    first, second, third = asyncio.run(three())
    assert [r.reward for r in first or []] == [1.0, 2.0]
    assert second is None
    assert [r.reward for r in third or []] == [3.0, 1.0]
    assert len(replaced) == 3  # the common call, then twice the group alone


def test_death_of_a_worker_ends_the_run_without_a_replacement(functions: Any) -> None:
    runner, _ = mortal_runner()
    runner._replace = None
    with pytest.raises(EngineError, match="the actor died"):
        score(runner, group("deadly"))


def test_retries_back_off_until_the_call_succeeds(functions: Any) -> None:
    scored = score(make_runner("flaky", retries=2), group("a"))
    assert scored is not None
    first, second, third = functions.attempts
    assert second - first >= 0.5
    assert third - second >= 1.0


def test_without_rewards_rollouts_pass_unchanged() -> None:
    rollouts = group("a")
    assert score(RewardRunner([], [], RewardPolicy()), rollouts) == rollouts


def test_state_of_class_rewards_goes_into_checkpoints(functions: Any) -> None:
    pairs = [(reference("length"), 1.0), (reference("Counting", start=5), 1.0)]
    worker = RewardWorker(pairs, 1, 5.0)
    worker.start()
    asyncio.run(worker.score([reward_inputs(response="a")]))
    state = worker.state_dict()
    assert state == {"1": {"count": 6}}
    other = RewardWorker(pairs, 1, 5.0)
    other.start()
    other.load_state_dict(state)
    replies = asyncio.run(other.score([reward_inputs(response="a")]))
    assert replies[0][1].score == 7.0


def test_cancelled_scoring_leaves_the_runner_usable(functions: Any) -> None:
    runner = make_runner("slow", "length")

    async def cancel_then_score() -> list[Rollout] | None:
        task = asyncio.ensure_future(runner.score_group(group("a", "b")))
        await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        scored = await runner.score_group(group("cc"))
        await runner.close()
        return scored

    scored = asyncio.run(cancel_then_score())
    assert [r.reward for r in scored or []] == [3.0]


def scores(runner: RewardRunner, *responses: str, number: int = 0) -> list[float]:
    scored = score(runner, group(*responses, number=number))
    assert scored is not None
    return [one.reward for one in scored]


def test_state_of_rewards_goes_on_in_another_run(functions: Any) -> None:
    first = make_runner("Novel", "length", workers=2)
    assert scores(first, "a") == [2.0]
    assert scores(first, "bb") == [3.0]  # the other worker's turn
    state = asyncio.run(first.state_dict())
    second = make_runner("Novel", "length", workers=2)
    asyncio.run(second.load_state_dict(state))
    for runner in (first, second):
        assert scores(runner, "a") == [1.0]
        assert scores(runner, "a") == [2.0], "state is each worker's own"


def test_state_of_rewards_without_any_is_empty_and_asks_nobody(functions: Any) -> None:
    runner = make_runner("length")
    runner._workers = []
    assert asyncio.run(runner.state_dict()) == {}
    asyncio.run(runner.load_state_dict({}))


def test_more_workers_than_before_start_from_the_first_ones_state(functions: Any) -> None:
    first = make_runner("Novel")
    scores(first, "a")
    second = make_runner("Novel", workers=2)
    asyncio.run(second.load_state_dict(asyncio.run(first.state_dict())))
    assert scores(second, "a") + scores(second, "a") == [0.0, 0.0]


def test_replaced_worker_gets_the_state_that_was_taken_last(functions: Any) -> None:
    pairs = [(reference("Novel"), 1.0)]

    def new() -> Mortal:
        worker = RewardWorker(pairs, 1, 5.0)
        worker.start()
        return Mortal(worker)

    async def replace(index: int, why: str) -> Mortal:
        return new()

    runner = RewardRunner([new()], pairs, RewardPolicy(failure="drop_group"), replace=replace)
    assert scores(runner, "a") == [1.0]
    asyncio.run(runner.state_dict())
    assert score(runner, group("deadly")) is None
    assert scores(runner, "a") == [0.0]
