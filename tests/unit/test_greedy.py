"""An estimator that asks for it gets one greedy rollout per task, beside the group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest
from tiny_tokenizer import tiny_tokenizer

import rlx
from rlx.core.agents import Limits
from rlx.core.engine.advantages import compute_advantages
from rlx.core.engine.batches import make_batch
from rlx.core.engine.collector import GroupMaker
from rlx.core.engine.interfaces import Generation, Sampling
from rlx.core.engine.metrics import rollout_metrics
from rlx.core.rollouts import Group, Rollout, Task

TOKENIZER = tiny_tokenizer()
SAMPLING = Sampling(max_new_tokens=4, temperature=0.7, top_p=0.9, top_k=5)
TASK = Task(id="data/0", prompt="1+1=", tokens=TOKENIZER("1+1=")["input_ids"], label="2")


@dataclass
class Engine:
    """Greedy: `22`, otherwise `1`."""

    asked: list[tuple[Sampling, int]] = field(default_factory=list)

    @contextmanager
    def group(self, size: int) -> Iterator[Any]:
        yield self.generate

    async def generate(self, prompt: Sequence[int], sampling: Sampling, seed: int) -> Generation:
        self.asked.append((sampling, seed))
        tokens = TOKENIZER("1" if sampling.temperature else "22")["input_ids"]
        return Generation(
            request_id=0,
            tokens=np.array(tokens, np.int32),
            logprobs=np.zeros(len(tokens), np.float32),
            finish_reason="stop",
            version=0,
        )


@dataclass
class Scorer:
    """Length of the text; drops groups with a text in `drop`."""

    drop: frozenset[str] = frozenset()
    calls: list[int] = field(default_factory=list)

    async def score_group(self, rollouts: Sequence[Rollout]) -> list[Rollout] | None:
        self.calls.append(len(rollouts))
        if any(rollout.text in self.drop for rollout in rollouts):
            return None
        return [replace(rollout, reward=float(len(rollout.text))) for rollout in rollouts]


def make(*, greedy: bool, scorer: Scorer | None = None) -> tuple[Group | None, Engine, Scorer]:
    engine, scorer = Engine(), scorer or Scorer()
    maker = GroupMaker(
        client=cast(Any, engine),
        agent=rlx.resolve("agents", "single_turn"),
        scorer=cast(Any, scorer),
        tokenizer=TOKENIZER,
        sampling=SAMPLING,
        limits=Limits(context_length=64),
        group_size=3,
        seed=0,
        greedy=greedy,
    )
    return asyncio.run(maker.make(TASK, 7)), engine, scorer


def test_greedy_rollout_is_one_more_and_not_in_the_group() -> None:
    group, engine, scorer = make(greedy=True)
    assert group is not None
    assert [rollout.text for rollout in group.rollouts] == ["1", "1", "1"]
    assert group.greedy is not None
    assert (group.greedy.text, group.greedy.reward, group.greedy.index) == ("22", 2.0, 3)
    assert sorted(scorer.calls) == [1, 3]
    assert [sampling.temperature for sampling, _ in engine.asked] == [0.7, 0.7, 0.7, 0.0]
    assert engine.asked[-1][0] == replace(SAMPLING, temperature=0.0, top_p=1.0, top_k=0)


def test_sampled_rollouts_do_not_depend_on_the_greedy_one() -> None:
    _, with_greedy, _ = make(greedy=True)
    group, without, _ = make(greedy=False)
    assert with_greedy.asked[:3] == without.asked
    assert group is not None
    assert group.greedy is None


@pytest.mark.parametrize("dropped", ["1", "22"])
def test_group_is_dropped_when_a_reward_of_either_failed(dropped: str) -> None:
    group, _, _ = make(greedy=True, scorer=Scorer(drop=frozenset({dropped})))
    assert group is None


def test_batch_holds_the_greedy_reward_of_each_rollouts_task() -> None:
    group, _, _ = make(greedy=True)
    assert group is not None
    assert group.greedy is not None
    better = replace(group, greedy=replace(group.greedy, reward=5.0))
    batch = make_batch([group, better])
    assert batch.greedy_rewards is not None
    assert batch.greedy_rewards.tolist() == [2.0] * 3 + [5.0] * 3
    assert batch.sequence_count == 6
    metrics = rollout_metrics([group, better])
    assert (metrics["rollout/greedy"], metrics["reward/greedy_mean"]) == (2.0, 3.5)
    assert metrics["reward/mean"] == 1.0


def test_remax_subtracts_the_greedy_reward() -> None:
    group, _, _ = make(greedy=True)
    assert group is not None
    batch, _ = compute_advantages(
        rlx.resolve("estimators", "remax"),
        make_batch([group]),
        [group],
        rlx.RunConfig(),
        {},
        kl_coef=0.0,
    )
    assert batch.advantages is not None
    assert batch.advantages.tolist() == [-1.0, -1.0, -1.0]


def test_no_greedy_rollouts_no_greedy_metrics() -> None:
    group, _, _ = make(greedy=False)
    assert group is not None
    assert make_batch([group]).greedy_rewards is None
    assert "rollout/greedy" not in rollout_metrics([group])
