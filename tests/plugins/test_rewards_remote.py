"""`remote`: what is sent, what is made of the answer, and what happens when there is none."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scripted_server import Answer, lengths, serving

import rlx
from rlx.core.config import RewardPolicy
from rlx.core.engine.reward_worker import RewardWorker
from rlx.core.engine.rewards import RewardRunner
from rlx.core.errors import ComponentError, UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.reward_protocol import Sample, encode_request
from rlx.core.rewards import Reward, RewardInputs
from rlx.core.rollouts import Rollout, Span, Task
from rlx.testing import check_reward


def remote(url: Any, **params: Any) -> Any:
    return rlx.resolve("rewards", "remote", url=url, **{"backoff": 0.01, **params})


def samples(*responses: str) -> list[RewardInputs]:
    return [RewardInputs(prompt="p", response=text, index=i) for i, text in enumerate(responses)]


def ask(component: Any, given: Any) -> Any:
    async def once() -> Any:
        return await component(given)

    return asyncio.run(once())


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def scored(body: dict[str, Any]) -> bool:
    """Whether a request has samples: not the one that is sent at the start."""
    return bool(body["samples"])


def test_rewards_come_back_in_the_order_of_the_samples() -> None:
    with serving(lengths) as server:
        answer = ask(remote(server.url), samples("a", "bbb", ""))
    assert answer == [Reward(1.0), Reward(3.0), Reward(0.0)]
    assert server.paths == ["/score", "/score"]  # the first one has no samples
    assert [len(body["samples"]) for body in server.requests] == [0, 3]


def test_parts_metrics_and_rewards_that_do_not_apply_survive_the_way() -> None:
    reply = [
        {"score": 0.1 + 0.2, "parts": {"style": -1}, "metrics": {"n": 2}, "unknown": "ignored"},
        {"score": None, "note": "no question in it"},
    ]
    with serving(lambda body, _: (200, {"rewards": reply[: len(body["samples"])]})) as server:
        answer = ask(remote(server.url), samples("a", "b"))
    nothing = Reward(None, note="no question in it")
    assert answer == [Reward(0.1 + 0.2, {"style": -1.0}, {"n": 2.0}), nothing]


def test_a_sample_arrives_as_it_left() -> None:
    import json

    left = RewardInputs(
        prompt=[{"role": "user", "content": "é\u0301🙂 \ud800"}],
        response="\0\n",
        messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        label=4,
        task={"id": np.int64(3), "rows": np.arange(2), "nested": {"a": [1.5, None]}},
        tokens=np.array([5, 6], np.int32),
        finish_reason="length",
        turns=2,
        group_id=7,
        index=1,
        task_id="data/7",
        source="gsm8k",
        metadata={"solved": True},
    )
    body = json.loads(encode_request([left], key="k"))
    (arrived,) = [Sample.model_validate(one).inputs() for one in body["samples"]]
    assert {name: getattr(arrived, name) for name in Sample.model_fields} == {
        **{name: getattr(left, name) for name in Sample.model_fields},
        "task": {"id": 3, "rows": [0, 1], "nested": {"a": [1.5, None]}},
        "tokens": [5, 6],
    }


def test_what_json_cannot_hold_becomes_null_or_text() -> None:
    import datetime

    given = {"nan": float("nan"), "when": datetime.date(2026, 1, 2), 3: {"x"}}
    body = encode_request([RewardInputs(prompt="p", response="r", task=given)], key="k")
    assert b'"task": {"nan": null, "when": "2026-01-02", "3": ["x"]}' in body


def test_scope_rollout_sends_one_sample_a_request() -> None:
    with serving(lengths) as server:
        component = remote(server.url, scope="rollout")
        assert component.tags.scope == "rollout"
        assert ask(component, samples("ab")[0]) == Reward(2.0)
    assert len(server.requests[-1]["samples"]) == 1


def test_a_request_is_sent_again_under_the_same_id_until_it_is_answered() -> None:
    def sometimes(body: dict[str, Any], number: int) -> Answer:
        return (503, {"error": "busy"}) if 1 <= number <= 3 else lengths(body)

    with serving(sometimes) as server:
        assert ask(remote(server.url), samples("abc")) == [Reward(3.0)]
    again = [body["id"] for body in server.requests if scored(body)]
    assert len(again) == 4
    assert len(set(again)) == 1
    assert {headers["Idempotency-Key"] for headers in server.headers[1:]} == set(again)


def test_requests_have_ids_of_their_own() -> None:
    with serving(lengths) as server:
        component = remote(server.url)
        for _ in range(3):
            ask(component, samples("a"))
    assert len({body["id"] for body in server.requests}) == 4


class Latest(random.Random):
    def uniform(self, a: float, b: float) -> float:
        return b


def test_waits_double_up_to_the_limit_with_a_quarter_by_chance(monkeypatch: Any) -> None:
    monkeypatch.setattr("rlx.plugins.rewards._http.LONGEST_REST", 0.08)
    times: list[float] = []

    def never(body: dict[str, Any], _: int) -> Answer:
        times.append(time.monotonic())
        return (503, b"") if scored(body) else lengths(body)

    with serving(never) as server:
        component = remote(server.url, retries=5, backoff=0.02)
        component.instance._pool._random = Latest()
        with pytest.raises(ComponentError, match=r"no answer in 6 attempts: http.*503"):
            ask(component, samples("a"))
    waits = np.diff(times[1:])
    for wait, least in zip(waits, [0.02, 0.04, 0.08, 0.08, 0.08], strict=True):
        assert 1.25 * least <= wait < 1.25 * least + 0.1


def test_requests_that_fail_together_count_as_one_failure() -> None:
    together = threading.Barrier(8)

    def script(body: dict[str, Any], number: int) -> Answer:
        if 1 <= number <= 8:
            together.wait(10)
            return 503, b""
        return lengths(body)

    with serving(script) as server:
        component = remote(server.url, backoff=0.1)

        async def many() -> Any:
            return await asyncio.gather(*(component(samples("a")) for _ in range(8)))

        started = time.monotonic()
        assert asyncio.run(many()) == [[Reward(1.0)]] * 8
    assert time.monotonic() - started < 3  # eight in a row would rest for the longest time, 8 s


def test_a_server_says_how_long_to_wait() -> None:
    times: list[float] = []

    def limited(body: dict[str, Any], number: int) -> Answer:
        times.append(time.monotonic())
        return (429, b"slow down", {"Retry-After": "0.3"}) if number == 1 else lengths(body)

    with serving(limited) as server:
        ask(remote(server.url), samples("a"))
    assert times[2] - times[1] >= 0.3


def test_another_server_takes_over_at_once_when_one_is_gone() -> None:
    gone = f"http://127.0.0.1:{closed_port()}"
    with serving(lengths) as server:
        component = remote([gone, server.url], backoff=30.0)
        started = time.monotonic()

        async def many() -> Any:
            return await asyncio.gather(*(component(samples("x" * n)) for n in range(1, 21)))

        answers = asyncio.run(many())
    assert [one.score for (one,) in answers] == [float(n) for n in range(1, 21)]
    assert time.monotonic() - started < 25


def test_a_server_that_comes_back_is_asked_again() -> None:
    port = closed_port()
    with serving(lengths) as first:
        component = remote([first.url, f"http://127.0.0.1:{port}"], backoff=0.05)
        ask(component, samples("a"))
        with serving(lengths, port=port) as second:
            deadline = time.monotonic() + 5
            while not second.requests and time.monotonic() < deadline:
                ask(component, samples("a"))
            assert second.requests


def test_the_server_with_the_fewest_requests_under_way_is_asked() -> None:
    release = threading.Event()

    def slow(body: dict[str, Any], _: int) -> Answer:
        if scored(body):
            release.wait(10)
        return lengths(body)

    with serving(slow) as slow_one, serving(lengths) as fast_one:
        component = remote([slow_one.url, fast_one.url])

        async def many() -> None:
            running = []
            for _ in range(20):
                running.append(asyncio.ensure_future(component(samples("a"))))
                deadline = time.monotonic() + 1  # for the fast one to have answered
                while sum(not one.done() for one in running) > 2 and time.monotonic() < deadline:
                    await asyncio.sleep(0.01)
            release.set()
            await asyncio.gather(*running)

        asyncio.run(many())
    asked = Counter(slow=sum(map(scored, slow_one.requests)))
    asked["fast"] = sum(map(scored, fast_one.requests))
    assert asked["slow"] <= 3
    assert asked["fast"] >= 17


def test_the_token_is_read_from_the_environment_and_sent(monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_TOKEN", "s3cret\n")
    with serving(lengths) as server:
        component = remote(server.url, token_env="MY_TOKEN")
        ask(component, samples("a"))
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer s3cret"}
    assert "s3cret" not in repr(component.ref.describe())


def test_a_token_that_is_not_there_is_named(monkeypatch: Any) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(UsageError, match="MY_TOKEN is not set"):
        remote("http://127.0.0.1:1", token_env="MY_TOKEN")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((401, {"error": "wrong token"}), r"refuses access: 401 Unauthorized: wrong token"),
        ((404, b"no such page"), r"refuses the request: 404 Not Found: no such page"),
        ((422, {"error": {"message": "samples: Field required"}}), r"422.*Field required"),
        ((200, b"<html>"), r"answers no JSON.*<html>"),
    ],
)
def test_a_server_that_refuses_ends_the_start_at_once(answer: Answer, said: str) -> None:
    with serving(lambda *_: answer) as server, pytest.raises(UsageError, match=said):
        remote(server.url, retries=100)
    assert len(server.requests) == 1


def test_one_of_several_servers_that_refuses_ends_the_start() -> None:
    with serving(lengths) as good, serving(lambda *_: (401, {"error": "wrong token"})) as bad:
        for urls in ([good.url, bad.url], [bad.url, good.url]):
            with pytest.raises(UsageError, match=f"{bad.url}/score refuses access"):
                remote(urls)


def test_no_server_at_the_start_is_a_mistake_with_its_address() -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    with pytest.raises(UsageError, match=f"no answer in 3 attempts: {url}/score: ConnectError"):
        remote(url, retries=2)


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://x", "http://", []])
def test_what_is_no_address_is_refused(url: Any) -> None:
    with pytest.raises(UsageError, match=r"no address|no endpoint"):
        remote(url)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ({"rewards": []}, "0 rewards for 2 samples"),
        ({"rewards": [{"score": "high"}, {"score": 1}]}, "rewards.0.score"),
        ([1, 2], "of the protocol"),
    ],
)
def test_an_answer_of_another_form_is_an_error_that_shows_it(reply: Any, said: str) -> None:
    def script(body: dict[str, Any], _: int) -> Answer:
        return (200, reply) if scored(body) else lengths(body)

    with serving(script) as server:
        component = remote(server.url)
        with pytest.raises(UsageError, match=said):
            ask(component, samples("a", "b"))


def test_servers_of_openrlhf_are_understood() -> None:
    def script(body: dict[str, Any], _: int) -> Answer:
        rewards = [len(query) for query in body["query"]]
        return 200, {"rewards": rewards, "scores": rewards, "extra_logs": {"half": [0.5, 0.5]}}

    with serving(script) as server:
        component = remote(f"{server.url}/get_reward", format="openrlhf")
        answer = ask(component, samples("a", "bb"))
    assert [one.score for one in answer] == [2, 3]
    assert answer[0].metrics == {"half": 0.5, "scores": 2}
    assert server.paths == ["/get_reward"]
    assert server.requests == [
        {"query": ["pa", "pbb"], "prompts": ["p", "p"], "labels": [None] * 2}
    ]


def test_remote_conforms() -> None:
    with serving(lengths) as server:
        check_reward("remote", url=server.url, backoff=0.01, examples=8)


# In a run


def group(number: int, *responses: str) -> list[Rollout]:
    task = Task(id=f"data/{number}", prompt="p", tokens=[1])
    return [
        Rollout(
            task=task,
            group_id=number,
            index=i,
            tokens=np.arange(3, dtype=np.int32),
            spans=[Span(start=1, stop=3, version=0, finish_reason="stop")],
            logprobs=np.zeros(2, np.float32),
            text=text,
            finish_reason="stop",
        )
        for i, text in enumerate(responses)
    ]


class Here:
    def __init__(self, worker: RewardWorker) -> None:
        self._worker = worker

    async def call(self, method: str, *args: Any) -> Any:
        result = getattr(self._worker, method)(*args)
        return await result if asyncio.iscoroutine(result) else result


def runner(url: Any, policy: RewardPolicy, **params: Any) -> RewardRunner:
    ref = PluginSystem.load().ref("rewards", "remote", {"url": url, "backoff": 0.01, **params})
    worker = RewardWorker([(ref, 1.0)], policy.concurrency, policy.timeout)
    worker.start()
    return RewardRunner([Here(worker)], [(ref, 1.0)], policy)


@pytest.mark.parametrize("failure", ["raise", "drop_group", "default"])
def test_a_server_that_never_answers_ends_in_the_failure_policy_in_time(failure: Any) -> None:
    release = threading.Event()

    def silent(body: dict[str, Any], _: int) -> Answer:
        if scored(body):
            release.wait(20)
        return lengths(body)

    with serving(silent) as server:
        policy = RewardPolicy(timeout=0.6, failure=failure, default=-1.0)
        it = runner(server.url, policy, timeout=0.2)
        started = time.monotonic()
        if failure == "raise":
            with pytest.raises(ComponentError, match=r"'remote' did not return within 0\.6 s"):
                asyncio.run(it.score_group(group(0, "a", "b")))
        else:
            result = asyncio.run(it.score_group(group(0, "a", "b")))
            got = None if result is None else [rollout.reward for rollout in result]
            assert got == {"drop_group": None, "default": [-1.0, -1.0]}[failure]
        assert time.monotonic() - started < 3
        release.set()


def test_one_sample_that_the_server_could_not_score_does_not_fail_the_others() -> None:
    def script(body: dict[str, Any], _: int) -> Answer:
        answers = [{"score": 1.0}, {"error": "reward 'x' raised ValueError: odd"}, {"score": 2.0}]
        return 200, {"rewards": answers[: len(body["samples"])]}

    with serving(script) as server:
        it = runner(server.url, RewardPolicy(failure="default", default=-5.0))
        rollouts = asyncio.run(it.score_group(group(0, "a", "b", "c")))
        assert rollouts is not None
        assert [rollout.reward for rollout in rollouts] == [1.0, -5.0, 2.0]
        assert it.take_metrics()["reward/failed"] == 1.0
        strict = runner(server.url, RewardPolicy())
        with pytest.raises(ComponentError, match="'remote' failed: reward 'x' raised ValueError"):
            asyncio.run(strict.score_group(group(0, "a", "b", "c")))
