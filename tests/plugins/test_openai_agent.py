"""Programs with the real `openai` and `anthropic` packages as agents, against a scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.agents import Episode, Limits, run_agent
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.errors import ComponentError, UsageError
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Rollout, Task
from rlx.core.tool_calls import parser_of
from rlx.plugins.agents.endpoint.server import Endpoint
from rlx.plugins.agents.endpoint.texts import Texts
from rlx.plugins.agents.openai import OpenAIAgent
from rlx.testing import check_agent

PROGRAMS = Path(__file__).parent / "openai_programs.py"
TOOLS = "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}" + CHATML
CHAT, PLAIN = tiny_tokenizer(TOOLS), tiny_tokenizer()
EOS = int(CHAT.eos_token_id)
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
MESSAGES = [{"role": "user", "content": "2+3?"}]


@dataclass
class Engine:
    """Answers from a script, over and over; keeps what it was asked."""

    script: Sequence[str | Exception]
    prompts: list[list[int]] = field(default_factory=list)
    sampled: list[list[int]] = field(default_factory=list)
    sampling: list[Sampling] = field(default_factory=list)

    async def __call__(self, prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        number = len(self.prompts)
        self.prompts.append(prompt)
        self.sampling.append(sampling)
        await asyncio.sleep(0.01)
        text = self.script[number % len(self.script)]
        if isinstance(text, Exception):
            raise text
        tokens = [*PLAIN(text)["input_ids"], EOS]
        cut = tokens[: sampling.max_new_tokens]
        self.sampled.append(cut)
        return Generation(
            request_id=number,
            tokens=np.array(cut, np.int32),
            logprobs=-np.arange(1, len(cut) + 1, dtype=np.float32),
            finish_reason="stop" if len(cut) == len(tokens) else "length",
            version=0,
        )


def make_episode(
    script: Sequence[str | Exception],
    *,
    prompt: Any = MESSAGES,
    temperature: float = 1.0,
    **limits: Any,
) -> tuple[Episode, Engine]:
    engine = Engine(script)
    tokenizer = PLAIN if isinstance(prompt, str) else CHAT
    text = prompt
    if tokenizer is CHAT:
        text = CHAT.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
    task = Task(id="t/0", prompt=prompt, tokens=tokenizer(text)["input_ids"], label="5")
    episode = Episode(
        task=task,
        group_id=0,
        index=0,
        seed=1,
        generate=engine,
        tokenizer=tokenizer,
        sampling=Sampling(max_new_tokens=200, temperature=temperature),
        limits=Limits(context_length=4000, **limits),
    )
    return episode, engine


def agent(program: str | None = None, **params: Any) -> Bound:
    if program is not None:
        params["program"] = f"{PROGRAMS}:{program}"
    ref = ComponentRef(kind="agents", name="openai", target="test:openai")
    return Bound(ref=ref, obj=OpenAIAgent, params=params)


def play(bound: Bound, episode: Episode) -> Rollout:
    return asyncio.run(run_agent(bound, episode))


def raw(tokens: Any) -> str:
    return str(CHAT.decode(tokens, skip_special_tokens=False))


def trained(rollout: Rollout) -> list[list[int]]:
    return [rollout.tokens[span.start : span.stop].tolist() for span in rollout.spans]


def check_account(rollout: Rollout, engine: Engine) -> None:
    """Exactly the sampled tokens are action tokens, each after the prompt that it was sampled for,
    with the log-prob that the engine gave it."""
    assert trained(rollout) == engine.sampled
    expected = [-float(i + 1) for tokens in engine.sampled for i in range(len(tokens))]
    assert rollout.logprobs.tolist() == expected
    starts = [*rollout.segments, len(rollout.tokens)]
    for span, prompt in zip(rollout.spans, engine.prompts, strict=True):
        begin = max(start for start in starts if start <= span.start)
        assert rollout.tokens[begin : span.start].tolist() == prompt


@pytest.mark.slow
def test_it_passes_the_conformance_kit() -> None:
    """Some 15 s: an OpenAI client for every episode, and one in a fresh process."""
    check_agent("openai", examples=2, program=f"{PROGRAMS}:any_prompt")


def test_one_question_is_one_turn_after_the_tasks_own_prompt() -> None:
    episode, engine = make_episode(["five"])
    rollout = play(agent("one_question"), episode)
    check_account(rollout, engine)
    assert engine.prompts == [list(episode.task.tokens)]
    assert (rollout.text, rollout.reward, rollout.finish_reason) == ("five", 0.0, "stop")


def test_an_extended_conversation_extends_the_rollout() -> None:
    episode, engine = make_episode(["4", "5"])
    rollout = play(agent("two_questions"), episode)
    check_account(rollout, engine)
    assert list(rollout.segments) == [0]
    assert raw(rollout.tokens) == (
        "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n5<|im_end|>"
    )
    assert [span.reward for span in rollout.spans] == [0.0, 1.0]


def test_a_command_gets_task_and_endpoint_from_outside() -> None:
    episode, engine = make_episode(["4", "5"])
    rollout = play(agent(command=f"{sys.executable} {PROGRAMS}"), episode)
    check_account(rollout, engine)
    assert len(rollout.spans) == 2
    assert rollout.spans[-1].reward == 0.5


def test_tool_calls_come_as_such_and_stay_as_the_model_wrote_them() -> None:
    episode, engine = make_episode([f"Let me see. {CALL}", "5"])
    rollout = play(agent("with_a_tool"), episode)
    check_account(rollout, engine)
    # the tools are part of the prompt, which is thus not the task's own
    assert raw(rollout.tokens).startswith("<|im_start|>tools\n[{")
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in raw(rollout.tokens)
    assert list(rollout.segments) == [0]
    assert (rollout.text, rollout.metrics) == ("5", {"asked": 4.0})


def test_streams_carry_the_same_text() -> None:
    episode, engine = make_episode(["two  words\n", " and more"])
    rollout = play(agent("streaming"), episode)
    check_account(rollout, engine)
    assert rollout.text == "two  words\n and more"


def test_completions_go_on_from_a_text_that_was_cut_off_or_stopped() -> None:
    episode, engine = make_episode(["abcdef", "g#h"], prompt="start: ")
    rollout = play(agent("text_only"), episode)
    assert raw(rollout.tokens) == "start: abc[next]g#"
    assert list(rollout.segments) == [0]
    assert [raw(tokens) for tokens in trained(rollout)] == ["abc", "g#"]
    assert [s.max_new_tokens for s in engine.sampling] == [3, 3]
    assert rollout.logprobs.tolist() == [-1.0, -2.0, -3.0, -1.0, -2.0]


def test_a_text_after_a_finished_answer_is_a_new_segment() -> None:
    """The end-of-sequence token was sampled, and the program's prompt does not have it."""
    episode, engine = make_episode(["ab"], prompt="start: ")
    rollout = play(agent("text_only"), episode)
    check_account(rollout, engine)
    assert raw(engine.prompts[1]) == "start: ab[next]"
    assert len(rollout.segments) == 2


def test_calls_side_by_side_are_segments_of_one_rollout() -> None:
    episode, engine = make_episode(["a", "b", "c"])
    rollout = play(agent("side_by_side"), episode)
    assert len(rollout.segments) == len(rollout.spans) == 3
    assert sorted(map(raw, trained(rollout))) == ["a<|im_end|>", "b<|im_end|>", "c<|im_end|>"]
    assert all(prompt == list(episode.task.tokens) for prompt in engine.prompts)


def test_the_anthropic_format_with_tools_and_streaming() -> None:
    episode, engine = make_episode([CALL, "five"])
    rollout = play(agent("with_anthropic"), episode)
    check_account(rollout, engine)
    assert list(rollout.segments) == [0]
    assert "system\nBe brief.<|im_end|>" in raw(rollout.tokens)
    assert f"{CALL}<|im_end|>\n<|im_start|>tool\n5<|im_end|>" in raw(rollout.tokens)
    assert rollout.text == "five"


def test_a_limit_ends_the_program_and_keeps_what_there_is() -> None:
    episode, engine = make_episode(["a"], max_turns=2)
    rollout = play(agent("asks_for_ever"), episode)
    check_account(rollout, engine)
    assert (rollout.finish_reason, len(rollout.spans)) == ("max_turns", 2)


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("fails", "RuntimeError: no such file"),
        ("returns_a_list", "returned list"),
        ("never_asks", "ended without an engine call"),
    ],
)
def test_mistakes_of_programs_are_the_agents(program: str, expected: str) -> None:
    with pytest.raises(ComponentError, match=expected):
        play(agent(program), make_episode(["a"])[0])


def test_a_coroutine_that_blocks_or_exits_leaves_the_episodes_loop_alone() -> None:
    blocking, ticking = agent("blocks_and_exits"), agent("ticks")

    async def both() -> tuple[Rollout | BaseException, Rollout, float]:
        # imports are paid for first
        await run_agent(ticking, make_episode(["a"])[0])
        longest, before = 0.0, time.monotonic()

        async def pulse() -> None:
            nonlocal longest, before
            while True:
                await asyncio.sleep(0.01)
                now = time.monotonic()
                longest, before = max(longest, now - before), now

        heart = asyncio.ensure_future(pulse())
        first, second = make_episode(["a"])[0], make_episode(["b"])[0]
        bad, good = await asyncio.gather(
            run_agent(blocking, first),
            run_agent(ticking, second),
            return_exceptions=True,
        )
        heart.cancel()
        return bad, good, longest

    bad, good, longest = asyncio.run(both())
    assert "sys.exit(3)" in str(bad)
    assert good.text == "b"
    assert longest < 2.5


@pytest.mark.slow
@pytest.mark.parametrize("program", ["loops_for_ever", "blocks_in_c"])
def test_a_coroutine_that_blocks_for_ever_is_ended_and_others_go_on(program: str) -> None:
    bound = agent(program)

    def one(name: str) -> Episode:
        episode, _ = make_episode(["a"], step_timeout=2.0)
        episode.task = replace(episode.task, id=name)
        return episode

    async def both() -> tuple[list[Rollout], Rollout]:
        beside = [run_agent(bound, one(name), on_error="keep") for name in ("bad", "good")]
        return await asyncio.gather(*beside), await run_agent(bound, one("good"))

    (bad, good), after = asyncio.run(both())
    assert "blocked the event loop" in str(bad.error)
    assert after.error is None
    if program == "loops_for_ever":
        assert good.error is None
    else:  # nothing ends a call in C: what shares its loop is given up with it
        assert "blocked the event loop" in str(good.error)


def test_a_program_may_return_nothing_in_a_dictionary() -> None:
    assert play(agent("says_nothing"), make_episode(["a"])[0]).text == "a"


def test_half_a_surrogate_pair_is_shown_as_a_replacement() -> None:
    episode, engine = make_episode(["a"], prompt="hi")

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        body = '{"prompt": "x\\ud83d"}'
        answer = await client.post(
            TEXT_PATH, content=body, headers={**header(token), "content-type": "application/json"}
        )
        assert answer.status_code == 200

    serve(check, episode)
    assert engine.prompts == [PLAIN("x\ufffd")["input_ids"]]


def test_a_tool_call_with_half_a_surrogate_pair_is_sent() -> None:
    said = CALL.replace("2", '"\\ud83d"')
    episode, _ = make_episode([said])
    tools = [{"name": "add", "input_schema": {"type": "object"}}]

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        body = {"messages": MESSAGES, "max_tokens": 100, "tools": tools}
        answer = await client.post(ANTHROPIC_PATH, json=body, headers=header(token))
        assert answer.json()["content"][0]["input"] == {"a": "\ud83d", "b": 3}

    serve(check, episode)


def test_training_and_evaluation_share_a_port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    async def both() -> list[Rollout]:
        agents = [agent("ticks", port=port) for _ in range(2)]
        episodes = [make_episode([text])[0] for text in "ab"]
        return list(await asyncio.gather(*map(run_agent, agents, episodes)))

    assert [rollout.text for rollout in asyncio.run(both())] == ["a", "b"]


def test_a_command_that_fails_says_what_it_wrote(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text("import sys; sys.exit('no such thing')")
    with pytest.raises(ComponentError, match="exit code 1: no such thing"):
        play(agent(command=f"{sys.executable} {script}"), make_episode(["a"])[0])


def test_a_command_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(child.pid))\n"
        "time.sleep(60)\n"
    )
    episode, _ = make_episode(["a"], max_seconds=2)
    rollout = play(agent(command=f"{sys.executable} {script}"), episode)
    assert rollout.finish_reason == "timeout"
    pid = int((tmp_path / "pid").read_text())
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_an_engine_that_fails_is_not_the_programs_fault() -> None:
    episode, _ = make_episode([RuntimeError("engine gone")])
    with pytest.raises(RuntimeError, match="engine gone"):
        play(agent("one_question"), episode)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, "needs a program"),
        ({"program": "a.py:b", "command": "x"}, "needs a program"),
        ({"program": f"{PROGRAMS}:one_questoin"}, "one_question"),
        ({"program": f"{PROGRAMS}:wrong_parameter"}, "it is given: task"),
        ({"program": "my_agent"}, "file.py:function"),
    ],
)
def test_a_program_that_can_not_run_is_an_error_at_the_start(
    params: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UsageError) as caught:
        OpenAIAgent(**params)
    assert expected in f"{caught.value} {caught.value.fix}"


def serve(check: Any, *episodes: Episode, **options: Any) -> None:
    """Open the episodes at one endpoint and call `check(endpoint, client, *tokens)`."""

    async def run() -> None:
        texts = Texts(tokenizer=episodes[0].tokenizer, parse=parser_of("auto"))
        endpoint = Endpoint(texts, **options)
        endpoint.start()
        try:
            with contextlib.ExitStack() as stack:
                tokens = [stack.enter_context(endpoint.session(one)) for one in episodes]
                async with httpx.AsyncClient(base_url=endpoint.url, timeout=10) as client:
                    await check(endpoint, client, *tokens)
        finally:
            await endpoint.stop()

    asyncio.run(run())


def header(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_a_wrong_token_and_one_whose_episode_is_over_get_401() -> None:
    episode, engine = make_episode(["a"])

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        body = {"messages": MESSAGES}
        with endpoint.session(make_episode(["b"])[0]) as over:
            pass
        for headers in ({}, header("x"), header(over), {"Authorization": "Basic x"}):
            for path in ("chat/completions", "completions", "messages"):
                answer = await client.post(f"/v1/{path}", json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["type"]) == (
                    401,
                    "authentication_error",
                )
            assert (await client.get("/v1/models", headers=headers)).status_code == 401
        assert not engine.prompts
        assert (
            await client.post("/v1/chat/completions", json=body, headers=header(token))
        ).status_code == 200
        answer = await client.get("/v1/models", headers=header(token))
        assert [item["id"] for item in answer.json()["data"]] == ["policy"]
        assert (await client.get("/v1/models/x", headers=header(token))).status_code == 404

    serve(check, episode)


def test_sessions_never_see_each_others_tokens() -> None:
    """Twenty episodes with the same prompts at one address, four turns each, all at once."""
    pairs = [make_episode([f"<{n}-{turn}>" for turn in range(4)]) for n in range(20)]

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, *tokens: str) -> None:
        async def talk(number: int, token: str) -> None:
            messages: list[Any] = [*MESSAGES]
            for turn in range(4):
                answer = await client.post(
                    "/v1/chat/completions", json={"messages": messages}, headers=header(token)
                )
                message = answer.json()["choices"][0]["message"]
                assert message["content"] == f"<{number}-{turn}>"
                messages += [message, {"role": "user", "content": "next"}]

        await asyncio.gather(*(talk(number, token) for number, token in enumerate(tokens)))

    serve(check, *(episode for episode, _ in pairs))
    for number, (episode, engine) in enumerate(pairs):
        rollout = episode.rollout()
        check_account(rollout, engine)
        assert list(rollout.segments) == [0]
        foreign = {f"<{n}-" for n in range(20) if n != number}
        assert not [text for text in foreign if text in raw(rollout.tokens)]


def test_more_sessions_than_files_may_be_open_at_first() -> None:
    """Each program holds a connection of its own; both ends are in this process."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    episodes = [make_episode(["a"])[0] for _ in range(300)]

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, *tokens: str) -> None:
        host, port = endpoint.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "x"}).encode()

        async def ask(token: str) -> tuple[asyncio.StreamWriter, bytes]:
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
            head += f"Host: x\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(f"POST {TEXT_PATH} HTTP/1.1\r\n{head}".encode() + body)
            return writer, await reader.readline()

        answers = await asyncio.gather(*map(ask, tokens))
        assert {line for _, line in answers} == {b"HTTP/1.1 200 OK\r\n"}
        for writer, _ in answers:
            writer.close()

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limits[1]))
    try:
        serve(check, *episodes)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert all(episode.turns == 1 for episode in episodes)


def test_the_endpoint_listens_on_loopback_only_unless_told_otherwise() -> None:
    episode, _ = make_episode(["a"])

    def addresses(host: str | None) -> set[str]:
        found: set[str] = set()

        async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
            port = int(endpoint.url.rpartition(":")[2])
            own = psutil.Process().net_connections("inet")
            found.update(c.laddr.ip for c in own if c.status == "LISTEN" and c.laddr.port == port)

        serve(check, episode, **({} if host is None else {"host": host}))
        return found

    assert addresses(None) == {"127.0.0.1"}
    assert addresses("0.0.0.0") == {"0.0.0.0"}


def test_a_port_that_is_taken_is_said() -> None:
    episode, _ = make_episode(["a"])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ComponentError, match=f"can't listen on 127.0.0.1:{port}"):
            serve(lambda *_: None, episode, port=port)


IMAGE = [{"role": "user", "content": [{"type": "image_url"}]}]
CHAT_PATH, TEXT_PATH, ANTHROPIC_PATH = "/v1/chat/completions", "/v1/completions", "/v1/messages"


@pytest.mark.parametrize(
    ("path", "body", "field", "expected"),
    [
        (CHAT_PATH, {"temperature": 0.2}, "temperature", "the run samples with temperature=1"),
        (CHAT_PATH, {"top_p": 0.5}, "top_p", "rollout.top_p=0.5"),
        (CHAT_PATH, {"n": 2}, "n", "n=2 is not possible"),
        (CHAT_PATH, {"presence_penalty": 1}, "presence_penalty", "not possible"),
        (CHAT_PATH, {"logit_bias": {"5": 1}}, "logit_bias", "not possible"),
        (CHAT_PATH, {"response_format": {"type": "json_object"}}, "response_format", "format"),
        (CHAT_PATH, {"guided_json": {"type": "object"}}, "guided_json", "not possible"),
        (CHAT_PATH, {"min_tokens": 5}, "min_tokens", "not possible"),
        (CHAT_PATH, {"tool_choice": "required"}, "tool_choice", "made to call"),
        (CHAT_PATH, {"top_logprobs": 3, "logprobs": True}, "top_logprobs", "not possible"),
        (CHAT_PATH, {"messages": []}, "messages", "empty"),
        (CHAT_PATH, {"messages": [{"content": "x"}]}, None, "role"),
        (CHAT_PATH, {"max_tokens": 0}, "max_tokens", "at least 1"),
        (CHAT_PATH, {"max_tokens": "many"}, "max_tokens", "integer"),
        (CHAT_PATH, {"messages": IMAGE}, None, "image_url"),
        (TEXT_PATH, {"prompt": ["a", "b"]}, "prompt", "one prompt at a time"),
        (TEXT_PATH, {"prompt": [5, 1_000_000]}, None, "token 1000000"),
        (TEXT_PATH, {"prompt": [5, -3]}, None, "token -3"),
        (TEXT_PATH, {"prompt": "a", "echo": True}, "echo", "not possible"),
        (TEXT_PATH, {"prompt": "a", "logprobs": 4}, "logprobs", "logprobs=1"),
        (ANTHROPIC_PATH, {"max_tokens": 5, "temperature": 0.5}, None, "temperature"),
        (ANTHROPIC_PATH, {}, None, "max_tokens"),
    ],
)  # fmt: skip
def test_what_a_session_can_not_give_is_a_400_that_says_why(
    path: str, body: dict[str, Any], field: str | None, expected: str
) -> None:
    episode, engine = make_episode(["a"])
    whole = {"messages": MESSAGES, **body} if path != TEXT_PATH else body

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        answer = await client.post(path, json=whole, headers=header(token))
        error = answer.json()["error"]
        assert (answer.status_code, error["type"]) == (400, "invalid_request_error")
        assert expected in error["message"]
        assert error.get("param") == field
        assert answer.headers["x-should-retry"] == "false"

    serve(check, episode)
    assert not engine.prompts


@pytest.mark.parametrize("body", [{"temperature": 1.0, "top_p": 1, "n": 1, "user": "x", "seed": 3}])
def test_what_changes_nothing_is_taken(body: dict[str, Any]) -> None:
    episode, engine = make_episode(["a"])

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        whole = {"messages": MESSAGES, **body}
        assert (await client.post(CHAT_PATH, json=whole, headers=header(token))).status_code == 200

    serve(check, episode)
    assert len(engine.prompts) == 1


def test_another_temperature_can_be_ignored_instead() -> None:
    episode, engine = make_episode(["a"])

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        body = {"messages": MESSAGES, "temperature": 0.2}
        assert (await client.post(CHAT_PATH, json=body, headers=header(token))).status_code == 200

    serve(check, episode, other_sampling="ignore")
    assert engine.sampling[0].temperature == 1.0


def test_a_greedy_evaluation_is_greedy_whatever_is_asked() -> None:
    episode, engine = make_episode(["a"], temperature=0.0)

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        body = {"messages": MESSAGES, "temperature": 1.0, "top_p": 0.9}
        assert (await client.post(CHAT_PATH, json=body, headers=header(token))).status_code == 200

    serve(check, episode)
    assert engine.sampling[0].temperature == 0


def test_a_model_without_chat_template_says_where_to_ask() -> None:
    episode, _ = make_episode(["a"], prompt="text")

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        answer = await client.post(CHAT_PATH, json={"messages": MESSAGES}, headers=header(token))
        assert answer.status_code == 400
        assert "/v1/completions" in answer.json()["error"]["message"]

    serve(check, episode)


@pytest.mark.parametrize("characters", [5_000, 10_000_000])
def test_a_prompt_beyond_the_context_is_refused_and_a_shorter_one_taken(characters: int) -> None:
    episode, engine = make_episode(["a"])

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        async def ask(messages: list[Any]) -> httpx.Response:
            body = {"messages": messages}
            return await client.post(CHAT_PATH, json=body, headers=header(token))

        first = (await ask(MESSAGES)).json()["choices"][0]["message"]
        flood = [*MESSAGES, first, {"role": "user", "content": "x" * characters}]
        for messages in (flood, flood[2:]):
            answer = await ask(messages)
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert episode.overflowed
        assert (await ask([*flood, {"role": "user", "content": "y"}])).status_code == 400
        assert (await ask([{"role": "user", "content": "summary"}])).status_code == 200

    serve(check, episode)
    assert (episode.overflowed, episode.ended) == (False, None)
    rollout = episode.rollout()
    check_account(rollout, engine)
    assert len(rollout.segments) == 2


def test_a_program_that_ends_of_a_full_context_has_not_failed() -> None:
    episode, engine = make_episode(["a" * 150])
    rollout = play(agent("goes_on_for_ever"), episode)
    check_account(rollout, engine)
    assert rollout.finish_reason == "max_tokens"
    assert len(rollout.spans) > 10
    assert len(rollout.tokens) <= 4000


def test_token_ids_as_prompt_extend_what_they_begin_with() -> None:
    episode, engine = make_episode(["ab", "c"], prompt="x")

    async def check(endpoint: Endpoint, client: httpx.AsyncClient, token: str) -> None:
        first = [*PLAIN("hello")["input_ids"]]
        second = [*first, *PLAIN("ab")["input_ids"], EOS, *PLAIN("more")["input_ids"]]
        for prompt in (first, second):
            body = {"prompt": prompt, "max_tokens": 5}
            answer = await client.post(TEXT_PATH, json=body, headers=header(token))
            assert answer.status_code == 200

    serve(check, episode)
    rollout = episode.rollout()
    check_account(rollout, engine)
    assert list(rollout.segments) == [0]
    assert raw(rollout.tokens) == "helloab<|im_end|>morec<|im_end|>"
