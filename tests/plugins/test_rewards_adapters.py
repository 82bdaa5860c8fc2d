"""Reward functions of OpenRLHF, TRL and verl run unchanged, selected by prefix."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest

import rlx
from rlx.core.engine.rewards import RewardWorker
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.rewards import Reward, RewardInputs
from rlx.plugins.rewards.adapters import adapt, resolve
from rlx.testing import reward_inputs

OPENRLHF = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    right = torch.tensor([float(q[len(p):] == l) for q, p, l in zip(queries, prompts, labels)])
    return {"rewards": 2 * right, "scores": right, "extra_logs": {"accuracy": right.mean()}}

def plain(qs, ps, ls):
    return torch.tensor([[float(len(q))] for q in qs])
"""

TRL = """
def match(completions, answer, **kwargs):
    return [1.0 if c == a else 0.0 for c, a in zip(completions, answer)]

def chat(prompts, completions, completion_ids, **kwargs):
    assert prompts[0][0]["role"] == "user"
    return [len(c[0]["content"]) + len(i) for c, i in zip(completions, completion_ids)]

def no_kwargs(completions):
    return [None if not c else 1.0 for c in completions]

async def later(prompts, completions, **kwargs):
    return [0.5] * len(prompts)

def too_few(completions, **kwargs):
    return [1.0]

def logs(completions, log_metric, log_extra, **kwargs):
    log_metric("longest", max(map(len, completions)))
    log_extra("upper", [text.upper() for text in completions])
    return [float(len(text)) for text in completions]

class Overlong:
    # as `get_soft_overlong_punishment(...)` returns it
    __name__ = "overlong"
    def __init__(self, most):
        self.most = most
    def __call__(self, completion_ids, **kwargs):
        return [-1.0 if len(ids) > self.most else 0.0 for ids in completion_ids]

class Later(Overlong):
    async def __call__(self, completion_ids, **kwargs):
        return super().__call__(completion_ids)

overlong, later_overlong = Overlong(2), Later(2)
"""

VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, bonus=0.0):
    assert data_source == "openai/gsm8k"
    score = float(solution_str == ground_truth) + bonus
    return {"score": score, "acc": score > 0, "pred": solution_str}

def plain(data_source, solution_str, ground_truth, extra_info):
    return extra_info["num_turns"] + (solution_str == ground_truth)

def gsm8k(solution_str, ground_truth, method="strict"):
    return float(method == "strict" and solution_str == ground_truth)

def no_score(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}
"""


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, text in (("reward_func", OPENRLHF), ("trl_fns", TRL), ("verl_fns", VERL)):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    return tmp_path


def scores(reference: str, samples: list[RewardInputs], **params: Any) -> list[Any]:
    """What a worker makes of the reference that the plugin system resolves."""
    ref = PluginSystem.load().ref("rewards", reference, params)
    worker = RewardWorker([(pickle.loads(pickle.dumps(ref)), 1.0)], 2, 30.0)
    worker.start()
    replies = asyncio.run(worker.score(samples))
    assert all(row[0].error is None for row in replies), replies
    return [row[0].score for row in replies]


def test_openrlhf_file_needs_no_function_name() -> None:
    samples = [reward_inputs(prompt="1+1=", response=r, label="2") for r in ("2", "3")]
    assert scores("openrlhf:reward_func.py", samples) == [2.0, 0.0]


def test_openrlhf_scores_and_logs_become_metrics() -> None:
    samples = [reward_inputs(prompt="1+1=", response=r, label="2") for r in ("2", "3")]
    rewards = adapt("openrlhf", "reward_func.py")(samples)
    assert rewards[0] == Reward(2.0, metrics={"accuracy": 0.5, "scores": 1.0})
    assert rewards[1] == Reward(0.0, metrics={"accuracy": 0.5, "scores": 0.0})


def test_openrlhf_function_may_return_a_column_of_a_tensor() -> None:
    samples = [reward_inputs(prompt="ab", response=r) for r in ("", "cde")]
    assert scores("openrlhf:reward_func.py:plain", samples) == [2.0, 5.0]


def test_trl_function_gets_columns_by_name() -> None:
    samples = [reward_inputs(response=r, answer="4") for r in ("4", "5", "4")]
    assert scores("trl:trl_fns:match", samples) == [1.0, 0.0, 1.0]


def test_trl_chat_completions_are_messages() -> None:
    prompt = [{"role": "user", "content": "hi"}]
    samples = [reward_inputs(prompt=prompt, response="four", tokens=[1, 2, 3])]
    assert scores("trl:trl_fns:chat", samples) == [7.0]


def test_trl_none_and_functions_without_kwargs() -> None:
    samples = [reward_inputs(response=r, answer="4") for r in ("", "x")]
    assert scores("trl:trl_fns:no_kwargs", samples) == [None, 1.0]


def test_trl_asynchronous_function() -> None:
    assert scores("trl:trl_fns:later", [reward_inputs(), reward_inputs()]) == [0.5, 0.5]


@pytest.mark.parametrize("name", ["overlong", "later_overlong"])
def test_trl_instances_are_functions_too(name: str) -> None:
    samples = [reward_inputs(tokens=tokens) for tokens in ([1], [1, 2, 3])]
    assert scores(f"trl:trl_fns:{name}", samples) == [0.0, -1.0]


def test_trl_logs_become_metrics_and_notes() -> None:
    rewards = adapt("trl", "trl_fns:logs")([reward_inputs(response=r) for r in ("ab", "c")])
    assert rewards == [
        Reward(2.0, metrics={"longest": 2}, note="upper: AB"),
        Reward(1.0, metrics={"longest": 2}, note="upper: C"),
    ]


def test_trl_wrong_number_of_rewards_is_an_error() -> None:
    with pytest.raises(TypeError, match="rewards: 1 values for 2 samples"):
        adapt("trl", "trl_fns:too_few")([reward_inputs(), reward_inputs()])


def test_verl_rows_are_read_as_verl_does() -> None:
    row: dict[str, Any] = {
        "data_source": "openai/gsm8k",
        "reward_model": {"style": "rule", "ground_truth": "4"},
        "extra_info": {"index": 3},
    }
    sample = reward_inputs(response="4", label="not this", **row)
    reward = adapt("verl", "verl_fns")(sample)
    assert reward == Reward(1.0, metrics={"acc": 1.0})
    assert scores("verl:verl_fns", [sample], kwargs={"bonus": 0.25}) == [1.25]


def test_verl_function_without_verl_rows_gets_label_and_turns() -> None:
    sample = reward_inputs(response="4", label="4", turns=2)
    assert scores("verl:verl_fns:plain", [sample]) == [3.0]


def test_verl_functions_of_a_single_data_set_take_less() -> None:
    assert scores("verl:verl_fns:gsm8k", [reward_inputs(response="4", label="4")]) == [1.0]
    loose = {"kwargs": {"method": "flexible"}}
    assert scores("verl:verl_fns:gsm8k", [reward_inputs(response="4", label="4")], **loose) == [0.0]


def test_verl_dict_without_score_is_an_error() -> None:
    with pytest.raises(TypeError, match="needs the key 'score'"):
        adapt("verl", "verl_fns:no_score")(reward_inputs())


def test_reference_records_the_users_own_source(modules: Path) -> None:
    ref = resolve("openrlhf:reward_func.py")
    assert ref is not None
    assert ref.target == f"{modules / 'reward_func.py'}:reward_func"
    before = ref.source_hash
    (modules / "reward_func.py").write_text(OPENRLHF + "\n# edited\n")
    edited = resolve("openrlhf:reward_func.py")
    assert edited is not None
    assert edited.source_hash != before
    with pytest.raises(UsageError, match="source"):
        ref.resolve()


@pytest.mark.parametrize("reference", ["math", "pkg.mod:fn", "trl:", "file.py:fn", "other:pkg:fn"])
def test_other_references_are_left_to_others(reference: str) -> None:
    assert resolve(reference) is None


def test_trl_reference_names_its_function() -> None:
    with pytest.raises(UsageError, match="doesn't say which function"):
        PluginSystem.load().ref("rewards", "trl:trl_fns")


def test_missing_function_is_named_before_anything_starts() -> None:
    with pytest.raises(UsageError, match="matsch"):
        PluginSystem.load().ref("rewards", "trl:trl_fns:matsch")


def test_resolve_from_python() -> None:
    bound = rlx.resolve("rewards", "trl:trl_fns:match")
    assert bound.tags.scope == "batch"
    assert bound([reward_inputs(response="1", answer="1")]) == [1.0]
