"""Every kind of agent through a real engine and the learner: tokens, log-probs, failures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer
from whole_runs import arguments, metrics, run

pytestmark = [pytest.mark.slow, pytest.mark.engine]

KINDS = '''
"""The built-in agents; a random model writes neither calls nor code, so these see some in all."""

import rlx
from rlx.core.agents import run_agent
from rlx.core.tool_calls import ToolCall, ToolCalls
from rlx.plugins.agents.python_repl import PythonRepl
from rlx.plugins.agents.tool_calling import ToolCalling


class Calls(ToolCalling):
    def calls_of(self, text):
        call = ToolCall(name="calculate", arguments={"expression": f"{len(text)} * 2"})
        return ToolCalls(content=text, calls=(call,))


class Codes(PythonRepl):
    def code_of(self, text):
        return f"print({len(text)} * 2)"


class Mixed:
    """Groups take turns: tools, Python, retry with feedback, a step function."""

    def __init__(self):
        self.agents = [Calls(max_turns=2), Codes(max_turns=2)]
        self.retry = rlx.resolve("agents", "retry", attempts=2)

    async def run(self, episode):
        kind = episode.group_id % 4
        episode.metadata["kind"] = ("tools", "python", "retry", "fails")[kind]
        if kind < 2:
            await self.agents[kind].run(episode)
        elif kind == 2:
            await run_agent(self.retry, episode)
        else:
            await episode.generate()
            if episode.index:
                raise KeyError(episode.index)
'''


def pieces(record: dict[str, Any]) -> list[tuple[str, str]]:
    tokens, tokenizer = record["exact"]["tokens"], tiny_tokenizer(CHATML)
    found, at = [], record["exact"]["prompt_length"]
    for start, stop, *_ in record["exact"]["spans"]:
        if start > at:
            found.append(("given", tokenizer.decode(tokens[at:start])))
        found.append(("sampled", tokenizer.decode(tokens[start:stop])))
        at = stop
    assert at == len(tokens), "nothing comes after the last action"
    return found


def test_all_kinds_of_agents_train_together(workspace: Path) -> None:
    """One run of 2 steps, 12 groups: about 20 s."""
    (workspace / "tiny" / "chat_template.jinja").write_text(CHATML)
    (workspace / "kinds.py").write_text(KINDS)
    words = [
        *arguments("out", steps=2, runtime="inline", engine="transformers"),
        *"--agent kinds.py:Mixed --groups 8 --max-new-tokens 5 --set episode.failure=keep".split(),
        *"--set logging.rollouts=complete --estimator turn_returns".split(),
    ]
    run(workspace, words)
    steps = metrics(workspace / "out")
    for step in steps:
        # every action token, whichever agent it belongs to, and the ends of failed episodes
        assert step["mismatch/logprob_abs_max"] < 1e-4
        assert step["agent/failed"] == 6
        assert step["rollout/ended/error"] == 6 / 32
        assert step["tool_calls"] == step["code_runs"] == 1
        assert step["tool_errors"] == step["code_errors"] == 0
    records = [
        json.loads(line)
        for line in (workspace / "out/rollouts/step-000002.jsonl").read_text().splitlines()
    ]
    assert len(records) == 32
    kinds = {}
    for record in records:
        found = pieces(record)
        kind = record["exact"]["columns"]["kind"]
        kinds.setdefault(kind, []).append(found)
        said = [text for what, text in found if what == "sampled"]
        given = "".join(text for what, text in found if what == "given")
        actions = (
            [piece["text"] for piece in record["episode"] if piece["kind"] == "action"]
            if ("episode" in record)
            else said
        )
        assert actions == said, "what is marked as trained is what was sampled"
        assert len(record["exact"]["logprobs"]) == record["tokens"]
        if kind == "fails":
            assert len(said) == 1
            assert (record.get("error") is None) == (record["index"] == 0)
            continue
        assert len(said) == 2
        frame = {"tools": "<|im_start|>tool\n", "python": "```output\n", "retry": "not right"}
        assert given.count(frame[kind]) == 1
        assert given.count("<|im_start|>assistant\n") == 1
    assert {kind: len(found) for kind, found in kinds.items()} == dict.fromkeys(
        ("tools", "python", "retry", "fails"), 8
    )


EMPTY = """
async def fails_at_once(episode):
    if episode.index < 3:
        raise RuntimeError("no connection")
    await episode.generate()
"""


def test_rollouts_without_a_token_are_trained_around(workspace: Path) -> None:
    """Kept failures before the first engine call; about 10 s."""
    (workspace / "empty.py").write_text(EMPTY)
    words = arguments("out", steps=2, runtime="inline", engine="transformers")
    words += "--agent empty.py:fails_at_once --set episode.failure=keep".split()
    run(workspace, words)
    for step in metrics(workspace / "out"):
        assert step["agent/failed"] == 12
        assert step["rollout/ended/error"] == 0.75
        assert 0 < step["rollout/length_mean"] <= 2
    stopped = [*words, "--output", "other", "--set", "episode.failure=raise"]
    assert "no connection" in run(workspace, stopped, code=1)
