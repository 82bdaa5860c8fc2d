"""Whole runs with agents in people's own code: the real `openai` client, an OpenRLHF agent file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_tokenizer import CHATML, tiny_tokenizer
from whole_runs import arguments, metrics, run, write_model

pytestmark = pytest.mark.engine

PROGRAM = '''
from openai import OpenAI


def solve(task, base_url, api_key):
    """Two turns of one conversation, and one of another; digits are worth something."""
    client = OpenAI(base_url=base_url, api_key=api_key)

    def ask(messages):
        answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
        return answer.choices[0].message.content

    messages = [*task["prompt"]]
    first = ask(messages)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Sure?"}]
    second = ask(messages)
    third = ask([{"role": "user", "content": "Sum up."}])
    said = first + second + third
    return {"reward": sum(c.isdigit() for c in said) / 10, "metrics": {"said": len(said)}}
'''

OPENRLHF = """
import torch
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor


class AgentInstance(AgentInstanceBase):
    async def __init__(self, *args, **kwargs):
        self.turn = 0

    async def step(self, states, **kwargs):
        self.turn += 1
        digits = sum(c.isdigit() for c in states["action_text"])
        return {
            "rewards": torch.tensor(digits / 10),
            "environment_feedback": " again: ",
            "done": self.turn == 2,
            "extra_logs": {"digits": digits},
        }


class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.mark.parametrize(
    ("runtime", "engine"),
    [
        pytest.param("inline", "transformers"),
        pytest.param("ray", "vllm", marks=pytest.mark.slow),
    ],
)
def test_an_agent_with_the_openai_package_trains(
    workspace: Path, runtime: str, engine: str
) -> None:
    """A model with a chat template, threads of programs, an evaluation; 10 and 40 s."""
    write_model(workspace / "chat", tiny_tokenizer(CHATML))
    (workspace / "my_agent.py").write_text(PROGRAM)
    words = arguments("out", steps=3, runtime=runtime, engine=engine)
    words += ["--model", "chat", "--agent", "openai", "--set", "agent.program=my_agent.py:solve"]
    words += ["--eval-data", "data.jsonl", "--set", "eval.max_tasks=4"]
    run(workspace, [*words, "--set", "rewards=[]"])
    records = metrics(workspace / "out")
    assert len(records) == 3
    assert records[-1]["eval/data/mean"] >= 0
    for record in records:
        assert record["mismatch/logprob_abs_max"] < 1e-4
        assert record["rollout/turns_mean"] == 3
        # the second conversation is a segment of its own, but no rollout of its own
        assert record["rollout/segments_mean"] == 2
        assert record["said"] > 0
    assert len({record["policy/entropy"] for record in records}) == 3  # the weights did change


def test_an_openrlhf_agent_file_trains(workspace: Path) -> None:
    (workspace / "agent_func.py").write_text(OPENRLHF)
    words = arguments("out", steps=2, runtime="inline", engine="transformers")
    run(workspace, [*words, "--agent", "openrlhf:agent_func.py", "--set", "rewards=[]"])
    for record in metrics(workspace / "out"):
        assert record["mismatch/logprob_abs_max"] < 1e-4
        assert record["rollout/turns_mean"] == 2
        assert record["digits"] >= 0
        assert "rollout/segments_mean" not in record
    manifest = json.loads((workspace / "out" / "manifest.json").read_text())
    (agent,) = (item for item in manifest["components"] if item["kind"] == "agents")
    assert agent["target"].endswith("agent_func.py:AgentExecutor")
    assert agent["source_hash"]
