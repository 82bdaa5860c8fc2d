"""`judge`: what the model is asked, which number counts, and what happens when there is none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Answer, serving

import rlx
from rlx.core.errors import ComponentError, UsageError
from rlx.core.rewards import Reward, RewardInputs
from rlx.testing import check_reward

SAMPLE = RewardInputs(
    prompt=[{"role": "user", "content": "What is 2 + 2?"}],
    response="It is 4.",
    label="4",
    task={"level": "easy"},
)


def says(*replies: str) -> Any:
    """A script: the replies one after the other, the last one for ever."""

    def script(_: dict[str, Any], number: int) -> Answer:
        text = replies[min(number, len(replies) - 1)]
        return 200, {
            "choices": [{"message": {"role": "assistant", "content": text}}],
            "usage": {"completion_tokens": 5},
        }

    return script


def judge(url: Any, **params: Any) -> Any:
    urls = [f"{one}/v1" for one in url] if isinstance(url, list) else f"{url}/v1"
    return rlx.resolve("rewards", "judge", url=urls, model="m", **{"backoff": 0.01, **params})


def ask(component: Any, sample: RewardInputs = SAMPLE) -> Reward:
    async def once() -> Reward:
        return await component(sample)

    return asyncio.run(once())


def mark_of(*replies: str, **params: Any) -> float | None:
    with serving(says(*replies)) as server:
        return ask(judge(server.url, **params)).score


def test_the_request_is_an_ordinary_chat_completion() -> None:
    with serving(says("Score: 5")) as server:
        ask(judge(server.url, system="You judge.", rubric="Is it short?", body={"seed": 3}))
    (body,) = server.requests
    assert server.paths == ["/v1/chat/completions"]
    assert body["model"] == "m"
    assert body["temperature"] == 0.0
    assert body["max_tokens"] == 512
    assert body["seed"] == 3
    system, user = body["messages"]
    assert system == {"role": "system", "content": "You judge."}
    assert user["role"] == "user"
    expected = (
        "Is it short?\n\n<task>\nuser: What is 2 + 2?\n</task>\n\n"
        "<reference>\n4\n</reference>\n\n<response>\nIt is 4.\n</response>"
    )
    assert expected in user["content"]
    assert "from 0 (worst) to 10 (best)" in user["content"]
    assert user["content"].endswith("Score: NUMBER")


def test_without_a_label_there_is_no_reference() -> None:
    with serving(says("Score: 5")) as server:
        ask(judge(server.url), RewardInputs(prompt="p", response="r"))
    assert "reference" not in server.requests[0]["messages"][0]["content"]


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("Score: 7", 0.7),
        ("score = 7.5", 0.75),
        ("**Score:** 10", 1.0),
        ("**Score**: 0", 0.0),
        ("A bad Score: 2 would be unfair.\nScore: 9", 0.9),
    ],
)
def test_the_last_number_after_score_counts(reply: str, score: float) -> None:
    assert mark_of(reply) == pytest.approx(score)


def test_the_pattern_and_the_scale_can_be_others() -> None:
    assert mark_of("[[4]]", pattern=r"\[\[(\d)\]\]", scale=[1, 5]) == pytest.approx(0.75)
    assert mark_of("Score: -1", scale=[-1, 1]) == 0.0


def test_a_reply_without_a_mark_is_asked_for_again_and_told_so() -> None:
    with serving(says("Well.", "Score: 11", "Score: 8")) as server:
        reward = ask(judge(server.url))
    assert reward == Reward(0.8, metrics={"tokens": 15.0, "unmarked": 2.0})
    talks = [[m["role"] for m in body["messages"]] for body in server.requests]
    assert talks == [["user"], ["user", "assistant", "user"], ["user", *["assistant", "user"] * 2]]
    assert server.requests[1]["messages"][1]["content"] == "Well."
    assert "no number in the form" in server.requests[1]["messages"][2]["content"]


def test_no_mark_at_all_is_a_failure_and_not_a_zero() -> None:
    with (
        serving(says("I would rather not.")) as server,
        pytest.raises(ComponentError, match=r"no mark from 0 to 10 in 3 replies.*rather not"),
    ):
        ask(judge(server.url))


def test_an_empty_reply_counts_as_one_without_a_mark() -> None:
    def script(_: dict[str, Any], number: int) -> Answer:
        text = None if number == 0 else "Score: 1"
        return 200, {"choices": [{"message": {"content": text}}]}

    with serving(script) as server:
        assert ask(judge(server.url)).score == pytest.approx(0.1)


def test_an_endpoint_that_is_busy_is_asked_again() -> None:
    def script(body: dict[str, Any], number: int) -> Answer:
        return (
            (429, {"error": {"message": "rate limit"}}) if number < 2 else says("Score: 1")(body, 0)
        )

    with serving(script) as server:
        assert ask(judge(server.url)).score == pytest.approx(0.1)
    assert len(server.requests) == 3


def test_several_endpoints_share_the_work() -> None:
    with serving(says("Score: 1")) as first, serving(says("Score: 1")) as second:
        component = judge([first.url, second.url])

        async def many() -> None:
            await asyncio.gather(*(component(SAMPLE) for _ in range(10)))

        asyncio.run(many())
    assert len(first.requests) == len(second.requests) == 5


def test_the_key_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serving(says("Score: 1")) as server:
        ask(judge(server.url, token_env="JUDGE_KEY"))
    assert server.headers[0]["Authorization"] == "Bearer s3cret"


def test_a_template_of_ones_own_sees_the_row(tmp_path: Path) -> None:
    path = tmp_path / "rubric.jinja"
    path.write_text(
        "{{ task.level }} {{ messages | length }} {{ prompt }}|{{ response }}\n{{ low }}"
    )
    for template in (str(path), path.read_text()):
        with serving(says("Score: 1")) as server:
            ask(judge(server.url, template=template))
        content = server.requests[0]["messages"][0]["content"]
        assert content == "easy 0 user: What is 2 + 2?|It is 4.\n0"


def test_a_field_that_is_null_is_left_out() -> None:
    with serving(says("Score: 1")) as server:
        ask(judge(server.url, body={"max_tokens": None, "max_completion_tokens": 9}))
    assert "max_tokens" not in server.requests[0]
    assert server.requests[0]["max_completion_tokens"] == 9


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"template": "{% if %}"}, "no Jinja"),
        ({"template": "nowhere.jinja"}, "can't be read"),
        ({"pattern": "("}, "no regular expression"),
        ({"pattern": r"\d"}, "no group"),
        ({"scale": [5, 1]}, "scale"),
    ],
)
def test_what_can_not_be_is_refused_before_anything_is_asked(
    params: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        judge("http://127.0.0.1:1", **params)


def test_a_template_that_wants_what_is_not_there_says_so() -> None:
    component = judge("http://127.0.0.1:1", template="{{ task.nothing }}")
    with pytest.raises(UsageError, match=r"template fails.*nothing"):
        ask(component)


def test_an_address_that_is_no_api_is_said_plainly() -> None:
    with (
        serving(lambda *_: (200, {"object": "list"})) as server,
        pytest.raises(UsageError, match=r"no chat completion: \{'object': 'list'\}"),
    ):
        ask(judge(server.url))


def test_judge_conforms() -> None:
    def script(body: dict[str, Any], _: int) -> Answer:
        length = len(body["messages"][0]["content"])
        return says(f"Score: {length % 11}")(body, 0)

    with serving(script) as server:
        check_reward("judge", url=f"{server.url}/v1", model="m", backoff=0.01, examples=6)
