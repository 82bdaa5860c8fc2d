"""OpenRLHF agent files run unchanged, with exact token accounting and their rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

from rlx.core.agents import Episode, Limits, run_agent
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.errors import ComponentError, UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.rollouts import Rollout, Task

FILES = Path(__file__).parent / "openrlhf_agents"
PLAIN = tiny_tokenizer()
EOS = int(PLAIN.eos_token_id)


def play(reference: str, script: list[str], **limits: Any) -> Rollout:
    bound = PluginSystem.load(rlxfile=False).resolve("agents", f"openrlhf:{FILES}/{reference}", {})
    replies = iter(script)

    async def engine(prompt: list[int], sampling: Sampling, seed: int) -> Generation:
        tokens = [*PLAIN(next(replies))["input_ids"], EOS]
        cut = tokens[: sampling.max_new_tokens]
        return Generation(
            request_id=0,
            tokens=np.array(cut, np.int32),
            logprobs=-np.arange(1, len(cut) + 1, dtype=np.float32),
            finish_reason="stop" if len(cut) == len(tokens) else "length",
            version=0,
        )

    episode = Episode(
        task=Task(id="t/0", prompt="1+1=", tokens=PLAIN("1+1=")["input_ids"], label="2"),
        group_id=0,
        index=0,
        seed=1,
        generate=engine,
        tokenizer=PLAIN,
        sampling=Sampling(max_new_tokens=50),
        limits=Limits(context_length=500, **limits),
    )
    return asyncio.run(run_agent(bound, episode))


def raw(tokens: Any) -> str:
    return str(PLAIN.decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize(
    "executor", ["", ":AgentExecutor", ":OlderExecutor", ":OldExecutor", ":AgentInstance"]
)
def test_an_environment_is_played_with_its_rewards_on_their_turns(executor: str) -> None:
    rollout = play(f"counting.py{executor}", ["3", "2"])
    assert raw(rollout.tokens) == "1+1=3<|im_end|>\nAgain:2<|im_end|>"
    actions = [raw(rollout.tokens[span.start : span.stop]) for span in rollout.spans]
    assert actions == ["3<|im_end|>", "2<|im_end|>"]
    assert [span.reward for span in rollout.spans] == [0.0, 1.0]
    assert rollout.logprobs.tolist() == [-1.0, -2.0, -1.0, -2.0]
    assert rollout.metrics == {"scores": 1.0, "steps": 2.0}
    assert list(rollout.segments) == [0]
    assert rollout.text == "3\nAgain:2"
    assert [message["content"] for message in rollout.messages] == ["1+1=", "3", "\nAgain:", "2"]


def test_a_reward_that_the_executor_changes_is_the_episodes() -> None:
    rollout = play("counting.py:Doubling", ["2", "2"])
    assert [span.reward for span in rollout.spans] == [1.0, 3.0]


def test_an_executor_of_its_own_drives_the_engine_by_token_ids() -> None:
    rollout = play("own_execute.py", ["ab", "2"])
    assert raw(rollout.tokens) == "1+1=ab2<|im_end|>"
    assert [len(span) for span in rollout.spans] == [2, 2]
    assert (rollout.spans[-1].reward, rollout.metrics) == (1.0, {"scores": 0.5})


def test_an_executor_may_ask_from_an_event_loop_of_its_own() -> None:
    rollout = play("own_execute.py:FromAThread", ["2"])
    assert (raw(rollout.tokens), rollout.spans[0].reward) == ("1+1=2<|im_end|>", 1.0)


def test_an_environment_may_begin_with_a_prompt_of_its_own() -> None:
    rollout = play("own_execute.py:AgentInstance", ["1", "2"])
    assert raw(rollout.tokens) == "Other: 1<|im_end|>No.2<|im_end|>"
    assert [span.reward for span in rollout.spans] == [0.25, 0.25]


def test_limits_end_the_episode_with_what_there_is() -> None:
    rollout = play("counting.py", ["3", "2"], max_turns=1)
    assert (rollout.finish_reason, len(rollout.spans)) == ("max_turns", 1)


def test_images_are_refused() -> None:
    with pytest.raises(ComponentError, match="images"):
        play("counting.py:WithImages", ["2"])


def test_another_temperature_than_the_runs_is_refused() -> None:
    with pytest.raises(ComponentError, match=r"temperature=0\.3, but the run samples with"):
        play("own_execute.py:Hotter", ["a"])


@pytest.mark.parametrize(
    ("reference", "expected"),
    [
        ("missing.py", "there is no file"),
        ("counting.py:AgentExecuter", "AgentExecutor"),
        ("counting.py:torch.float32", "no class"),
    ],
)
def test_a_file_that_does_not_fit_is_an_error_at_the_start(reference: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        play(reference, ["a"])
    assert expected in f"{caught.value} {caught.value.fix}"


def test_a_file_whose_imports_fail_says_so(tmp_path: Path) -> None:
    file = tmp_path / "agent.py"
    file.write_text("import no_such_environment")
    with pytest.raises(UsageError, match="no_such_environment"):
        PluginSystem.load(rlxfile=False).resolve("agents", f"openrlhf:{file}", {})
