"""A Python session for the model: state, output, limits, nothing left behind, exact tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import psutil
import pytest
from test_tool_calling import Script, raw
from tiny_tokenizer import CHATML, tiny_tokenizer

from rlx.core.agents import Episode, Limits, run_agent
from rlx.core.engine.interfaces import Sampling
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import Rollout, Task
from rlx.plugins.agents._repl import PythonSession
from rlx.plugins.agents.python_repl import PythonRepl
from rlx.plugins.rewards.sandbox import Limits as SandboxLimits
from rlx.testing import check_agent

CHAT, PLAIN = tiny_tokenizer(CHATML), tiny_tokenizer()


def agent(**params: Any) -> Bound:
    ref = ComponentRef(kind="agents", name="python_repl", target="x:y")
    return Bound(ref=ref, obj=PythonRepl, params=params)


def episode(script: Sequence[str], *, chat: bool = True, **limits: Any) -> tuple[Episode, Script]:
    prompt: Any = [{"role": "user", "content": "hi"}] if chat else "hi"
    rendered = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n" if chat else "hi"
    engine = Script(script)
    made = Episode(
        task=Task(id="data/0", prompt=prompt, tokens=CHAT(rendered)["input_ids"]),
        group_id=0,
        index=0,
        seed=0,
        generate=engine,
        tokenizer=CHAT if chat else PLAIN,
        sampling=Sampling(max_new_tokens=500),
        limits=Limits(context_length=20_000, **limits),
    )
    return made, engine


def play(script: Sequence[str], *, chat: bool = True, **params: Any) -> tuple[Rollout, Script]:
    made, engine = episode(script, chat=chat)
    return asyncio.run(run_agent(agent(**params), made)), engine


def python(code: str) -> str:
    return f"I try.\n```python\n{code}\n```"


def outputs(rollout: Rollout) -> list[str]:
    return [str(m["content"]) for m in rollout.messages if "```output" in str(m["content"])]


def test_what_is_defined_stays_and_the_last_text_is_the_answer() -> None:
    script = [python("x = 6\nx * 7"), python("print(x)\nprint(y)"), "It is 42."]
    rollout, _ = play(script)
    first, second = outputs(rollout)
    assert first == "```output\n42\n```"
    assert second.startswith("```output\n6\nTraceback")
    assert "NameError: name 'y' is not defined" in second
    assert rollout.text == "It is 42."
    assert rollout.metrics == {"code_runs": 2.0, "code_errors": 1.0}


@pytest.mark.parametrize("chat", [True, False])
def test_exactly_the_sampled_tokens_are_trained(chat: bool) -> None:
    script = [python("print('out')"), python("1/0"), "done"]
    rollout, engine = play(script, chat=chat)
    trained = [rollout.tokens[span.start : span.stop].tolist() for span in rollout.spans]
    assert trained == engine.sampled
    assert [raw(tokens) for tokens in trained] == [text + "<|im_end|>" for text in script]
    for prompt, span in zip(engine.prompts, rollout.spans, strict=True):
        assert prompt == rollout.tokens[: span.start].tolist()
    assert "```output\nout\n```" in raw(engine.prompts[1])


def test_code_of_the_last_turn_is_not_run() -> None:
    rollout, _ = play([python("1"), python("2"), python("3")], max_turns=2)
    assert len(rollout.spans) == 2
    assert rollout.metrics["code_runs"] == 1.0


def test_a_session_keeps_code_in() -> None:
    cases = {
        "while True: pass": "[stopped: it took longer than 1 s",
        "x": "NameError",  # a new session
        "import os; os._exit(3)": "[stopped: its process ended",
        "import sys; sys.exit(3)": "SystemExit: 3",
        "open('/etc/passwd')": "PermissionError",
        "import socket; socket.create_connection(('1.1.1.1', 53), timeout=1)": "Error",
        "b = bytearray(1 << 40)": "MemoryError",
        "print('a' * 100_000)": "characters left out",
        "def f(:": "SyntaxError",
        "import os; os.write(1, b'x' * 10); 'fine'": "'fine'",
        "raise BaseException('b')": "BaseException: b",
    }

    async def whole() -> list[str]:
        session = PythonSession(limits=SandboxLimits(timeout=1.0), pieces=20, output=400)
        try:
            return [(await session.run(code)).text for code in cases]
        finally:
            await session.close()

    texts = asyncio.run(whole())
    for (code, expected), text in zip(cases.items(), texts, strict=True):
        assert expected in text, (code, text)
        assert len(text) < 700


def test_a_program_that_multiplies_is_ended() -> None:
    code = "import os\nwhile True:\n    if os.fork() == 0:\n        import time; time.sleep(60)"

    async def whole() -> tuple[str, str]:
        limits = SandboxLimits(timeout=10.0, processes=4)
        session = PythonSession(limits=limits, pieces=5, output=400)
        try:
            return (await session.run(code)).text, (await session.run("1 + 1")).text
        finally:
            await session.close()

    first, second = asyncio.run(whole())
    assert "processes" in first or "BlockingIOError" in first
    assert "2" in second or "names are gone" in second


def test_nothing_is_left_of_an_episode_that_is_cut_off() -> None:
    before = set(psutil.Process().children(recursive=True))
    started: list[psutil.Process] = []

    async def whole() -> Rollout:
        endless = python("import subprocess, sys, time\ntime.sleep(60)")
        made, _ = episode([python("1"), endless], max_seconds=2.0)
        running = asyncio.ensure_future(run_agent(agent(timeout=30.0), made))
        await asyncio.sleep(1.0)
        started.extend(set(psutil.Process().children(recursive=True)) - before)
        return await running

    begun = time.monotonic()
    rollout = asyncio.run(whole())
    assert rollout.finish_reason == "timeout"
    assert len(rollout.spans) == 2
    assert time.monotonic() - begun < 20
    assert started
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive


def test_more_episodes_than_sessions_take_turns() -> None:
    async def whole() -> list[Rollout]:
        bound = agent(sessions=2)
        made = [episode([python("import time; time.sleep(0.2); 5"), "ok"])[0] for _ in range(6)]
        return list(await asyncio.gather(*(run_agent(bound, one) for one in made)))

    for rollout in asyncio.run(whole()):
        assert outputs(rollout) == ["```output\n5\n```"]


def test_it_holds_what_agents_must_hold() -> None:
    check_agent("python_repl", examples=6)


@pytest.mark.parametrize("chat", [True, False])
def test_output_that_the_model_makes_up_is_not_sampled(chat: bool) -> None:
    made_up = python("print(6 * 7)") + "\n```output\n41\n```\nSo 41."
    rollout, engine = play([made_up, "42"], chat=chat)
    kept = rollout.tokens[rollout.spans[0].start : rollout.spans[0].stop]
    assert raw(kept) == python("print(6 * 7)") + "\n```output"
    assert rollout.spans[0].finish_reason == "stop"
    shown = raw(engine.prompts[1])
    assert "41" not in shown
    assert "```output\n42\n```" in shown
    assert shown.count("```output") == 1 + chat
    assert rollout.text == "42"
