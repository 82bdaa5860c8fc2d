"""The server of rewards without its socket: batches, repeated requests, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rlx.core.config import RewardPolicy
from rlx.core.engine.reward_server import make_app
from rlx.core.engine.reward_service import ConflictError, OverloadedError, RewardService
from rlx.core.plugins import PluginSystem
from rlx.core.rewards import RewardInputs

FUNCTIONS = """
import threading, time
import rlx

calls, gate, running, most = [], threading.Event(), 0, 0

def length(sample):
    calls.append(sample.response)
    return rlx.Reward(len(sample.response), parts={"half": len(sample.response) / 2},
                      metrics={"seen": 1})

def waits(sample):
    calls.append(sample.response)
    assert gate.wait(10)
    return 1.0

def none(sample):
    return None

def says(sample):
    return rlx.Reward(None, note="nothing to say about " + sample.response)

def breaks(sample):
    raise RuntimeError("broken today")

@rlx.component(scope="batch")
def size(samples):
    calls.append(len(samples))
    return [float(len(samples))] * len(samples)

@rlx.component(scope="group")
def together(samples):
    calls.append([x.response for x in samples])
    return [float(len(samples))] * len(samples)

@rlx.component(requires={"reward_model"}, scope="batch")
def heavy(samples):
    global running, most
    running += 1
    most = max(most, running)
    calls.append(len(samples))
    time.sleep(0.4)
    running -= 1
    return [0.0] * len(samples)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return path


def service(path: Path, *names: str, **options: Any) -> RewardService:
    """`names`: functions of the file, each as `name` or `name:weight`."""
    system = PluginSystem.load(hooks=False)
    rewards = []
    for text in names:
        name, _, weight = text.partition(":")
        rewards.append((system.ref("rewards", f"{path}:{name}"), float(weight or 1)))
    built = RewardService(rewards, RewardPolicy(timeout=15.0), **options)
    built.load()
    return built


def module_of(it: RewardService) -> Any:
    """The module with the functions, as the service has it."""
    import sys

    return sys.modules[it._worker._calls[0].bound.instance.__module__]


def samples(*responses: str, group: int = 0) -> list[RewardInputs]:
    return [RewardInputs(prompt="p", response=text, group_id=group) for text in responses]


def run(it: RewardService, work: Callable[[], Awaitable[Any]]) -> Any:
    async def whole() -> Any:
        try:
            return await work()
        finally:
            await it.close()

    return asyncio.run(whole())


def test_a_single_reward_is_answered_with_its_own_parts(functions: Path) -> None:
    it = service(functions, "length:2")
    (answer,) = run(it, lambda: it.score(samples("abc")))
    assert answer == {"score": 6.0, "parts": {"half": 1.5}, "metrics": {"seen": 1.0}}


def test_several_rewards_are_summed_and_become_parts(functions: Path) -> None:
    it = service(functions, "length", "none", "size:0.5")
    (answer,) = run(it, lambda: it.score(samples("abc")))
    assert answer == {
        "score": 3.5,
        "parts": {"length": 3.0, "length/half": 1.5, "size": 1.0},
        "metrics": {"length/seen": 1.0},
    }


def test_a_reward_that_applies_to_nothing_has_no_score(functions: Path) -> None:
    it = service(functions, "none")
    assert run(it, lambda: it.score(samples("a"))) == [{"score": None, "parts": {}, "metrics": {}}]


def test_notes_are_passed_on_under_the_names_of_their_rewards(functions: Path) -> None:
    it = service(functions, "says")
    (answer,) = run(it, lambda: it.score(samples("a")))
    assert answer["note"] == "nothing to say about a"
    it = service(functions, "length", "says")
    (answer,) = run(it, lambda: it.score(samples("ab")))
    assert (answer["score"], answer["note"]) == (2.0, "says: nothing to say about ab")


def test_one_failing_reward_fails_the_sample_and_says_why(functions: Path) -> None:
    it = service(functions, "length", "breaks")
    (answer,) = run(it, lambda: it.score(samples("a")))
    assert list(answer) == ["error"]
    assert "raised RuntimeError: broken today" in answer["error"]
    assert it.counts["failed"] == 1


def test_requests_that_come_together_are_scored_together(functions: Path) -> None:
    it = service(functions, "size", batch=16, wait=0.2)

    async def work() -> Any:
        return await asyncio.gather(*(it.score(samples("a", "b")) for _ in range(8)))

    assert run(it, work) == [[{"score": 16.0, "parts": {}, "metrics": {}}] * 2] * 8
    assert it.counts["batches"] == 1


def test_a_full_batch_does_not_wait_and_a_lonely_request_waits_no_longer_than_said(
    functions: Path,
) -> None:
    it = service(functions, "size", batch=2, wait=0.1)

    async def work() -> list[float]:
        loop, seconds = asyncio.get_running_loop(), []
        for texts in (("a", "b"), ("c",)):
            started = loop.time()
            await it.score(samples(*texts))
            seconds.append(loop.time() - started)
        return seconds

    full, lonely = run(it, work)
    assert full < 0.09
    assert 0.1 <= lonely < 1.0


def test_while_a_model_works_the_next_batch_fills(functions: Path) -> None:
    it = service(functions, "heavy", batch=100, wait=0.0)

    async def work() -> None:
        asked = [asyncio.ensure_future(it.score(samples("a")))]
        for _ in range(10):
            await asyncio.sleep(0.01)
            asked.append(asyncio.ensure_future(it.score(samples("b"))))
        await asyncio.gather(*asked)

    run(it, work)
    assert module_of(it).calls == [1, 10]
    assert module_of(it).most == 1


def test_groups_of_different_callers_stay_apart(functions: Path) -> None:
    it = service(functions, "together", wait=0.1)

    async def work() -> Any:
        return await asyncio.gather(
            it.score(samples("a", "b", group=0)), it.score([*samples("c"), *samples("d", group=1)])
        )

    first, second = run(it, work)
    assert [one["score"] for one in first] == [2.0, 2.0]
    assert [one["score"] for one in second] == [1.0, 1.0]
    assert sorted(module_of(it).calls) == [["a", "b"], ["c"], ["d"]]


def test_a_repeated_request_is_not_scored_again(functions: Path) -> None:
    it = service(functions, "waits")

    async def work() -> Any:
        asked = [asyncio.ensure_future(it.score(samples("a"), key="k")) for _ in range(3)]
        await asyncio.sleep(0.05)
        asked[0].cancel()  # the caller hung up
        module_of(it).gate.set()
        later = await asyncio.gather(*asked[1:])
        return [*later, await it.score(samples("a"), key="k")]

    assert run(it, work) == [[{"score": 1.0, "parts": {}, "metrics": {}}]] * 3
    assert module_of(it).calls == ["a"]
    assert it.counts["repeated"] == 3


def test_an_id_belongs_to_one_request(functions: Path) -> None:
    it = service(functions, "length")

    async def work() -> None:
        await it.score(samples("a"), key="k", content=b"1")
        await it.score(samples("b"), key="k", content=b"2")

    with pytest.raises(ConflictError, match="'k' was given to another request"):
        run(it, work)


def test_a_request_that_died_with_the_service_is_scored_when_it_comes_again(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = service(functions, "length")
    score = it._worker.score

    async def broken(_: Any) -> Any:
        raise RuntimeError("out of memory")

    async def work() -> Any:
        monkeypatch.setattr(it._worker, "score", broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            await it.score(samples("a"), key="k")
        monkeypatch.setattr(it._worker, "score", score)
        return await it.score(samples("a"), key="k")

    assert run(it, work)[0]["score"] == 1.0


def test_more_than_may_wait_is_turned_away(functions: Path) -> None:
    it = service(functions, "waits", waiting=3)

    async def work() -> Any:
        first = asyncio.ensure_future(it.score(samples("a", "b")))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match="2 samples wait"):
            await it.score(samples("c", "d"))
        module_of(it).gate.set()
        await first
        return await it.score(samples("c", "d"))

    assert len(run(it, work)) == 2


def test_answers_are_kept_for_a_while_only(
    functions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.core.engine.reward_service._KEPT", 2)
    it = service(functions, "length")

    async def work() -> None:
        for key in "abca":
            await it.score(samples(key), key=key)

    run(it, work)
    assert module_of(it).calls == ["a", "b", "c", "a"]


# Over HTTP

GOOD = {"samples": [{"prompt": "p", "response": "abc"}]}


def post(
    functions: Path,
    body: Any,
    *,
    token: str | None = None,
    headers: dict[str, str] | None = None,
    path: str = "/score",
    reward: str = "length",
) -> httpx.Response:
    it = service(functions, reward)

    async def work() -> httpx.Response:
        app = make_app(it, token=token, max_body=2000)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            data = body if isinstance(body, (bytes, str)) else json.dumps(body)
            given = {"Content-Type": "application/json", **(headers or {})}
            return await client.post(path, content=data, headers=given)

    return run(it, work)


def test_a_request_is_answered(functions: Path) -> None:
    response = post(functions, GOOD)
    assert response.status_code == 200
    assert response.json() == {
        "rewards": [{"score": 3.0, "parts": {"half": 1.5}, "metrics": {"seen": 1.0}}]
    }


def test_no_samples_are_answered_with_no_rewards(functions: Path) -> None:
    assert post(functions, {"id": "x", "samples": []}).json() == {"rewards": []}


@pytest.mark.parametrize(
    ("body", "headers", "status", "said"),
    [
        ('{"samples": [', {}, 400, "not JSON: Expecting value: line 1 column 14"),
        (b"\xff\xfe", {}, 400, "not JSON"),
        ("[" * 1990, {}, 400, "not JSON"),
        ({}, {}, 422, "samples: Field required"),
        ({"samples": [{"prompt": "p"}]}, {}, 422, "samples.0.response: Field required"),
        ({"samples": [{"prompt": 3, "response": ""}]}, {}, 422, "samples.0.prompt"),
        ({"samples": [], "idd": 1}, {}, 422, "idd: Extra inputs are not permitted, not 1"),
        ({"samples": [{**GOOD["samples"][0], "lable": 1}]}, {}, 422, "samples.0.lable"),
        ([], {}, 422, "the request: "),
        (GOOD, {"Content-Type": "text/plain"}, 415, "Content-Type: application/json"),
        ({"samples": [], "id": "x" * 2000}, {}, 413, "at most 0.00190735 MiB"),
        (b"x" * 5, {"Content-Length": "99999"}, 413, "--max-body-mib"),
    ],
)
def test_a_bad_request_is_told_what_is_wrong(
    functions: Path, body: Any, headers: dict[str, str], status: int, said: str
) -> None:
    response = post(functions, body, headers=headers)
    assert response.status_code == status
    assert said in response.json()["error"]


def test_a_large_body_that_announces_no_length_is_cut_off(functions: Path) -> None:
    it = service(functions, "length")
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 1000
            yield b" " * 1000

    async def work() -> httpx.Response:
        transport = httpx.ASGITransport(make_app(it, token=None, max_body=10_000))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(
                "/score", content=endless(), headers={"Content-Type": "application/json"}
            )

    assert run(it, work).status_code == 413
    assert sent <= 12_000


@pytest.mark.parametrize(
    ("header", "said"),
    [
        (None, "a token is needed"),
        ("Bearer wrong", "wrong token"),
        ("Bearer s3cre", "wrong token"),
        ("Bearer ", "a token is needed"),
        ("Basic czNjcmV0", "takes bearer tokens, not 'Basic'"),
        ("Bearer é", "wrong token"),
    ],
)
def test_who_has_no_token_is_refused_before_anything_is_read(
    functions: Path, header: str | None, said: str
) -> None:
    headers: Any = {} if header is None else {"Authorization": header.encode()}
    response = post(functions, "not even JSON", token="s3cret", headers=headers)
    assert response.status_code == 401
    assert response.headers["WWW-Authenticate"] == "Bearer"
    assert said in response.json()["error"]
    assert "s3cret" not in response.text


def test_who_has_the_token_is_served(functions: Path) -> None:
    response = post(functions, GOOD, token="s3cret", headers={"Authorization": "bearer s3cret"})
    assert response.status_code == 200


def test_the_schema_that_the_server_describes_is_the_one_that_it_takes(functions: Path) -> None:
    app = make_app(service(functions, "length"), token=None, max_body=1)
    body = app.openapi()["paths"]["/score"]["post"]["requestBody"]
    described = body["content"]["application/json"]["schema"]
    assert set(described["properties"]) == {"id", "samples"}
