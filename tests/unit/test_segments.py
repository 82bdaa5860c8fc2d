"""A rollout of several segments: sequences for the model, one rollout for everything else."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from rlx.core.advantages import estimate
from rlx.core.config import LearnerConfig
from rlx.core.engine.advantages import estimator_inputs
from rlx.core.engine.batches import make_batch, take
from rlx.core.engine.interfaces import UpdateResult
from rlx.core.engine.learner.gradients import micro_fields
from rlx.core.engine.learner.packing import make_micro_batches
from rlx.core.engine.learner_group import LearnerGroup
from rlx.core.engine.metrics import advantage_metrics, rollout_metrics
from rlx.core.engine.records import groups_of, rollout_records
from rlx.core.engine.reward_norm import RunningNorm
from rlx.core.inputs import LossInputs
from rlx.core.objective import AGGREGATIONS, Denominators, ObjectiveSettings, aggregate
from rlx.core.rollouts import Group, Rollout, Span, Task, TrainBatch
from rlx.plugins.estimators.gae import gae
from rlx.plugins.estimators.group_norm import group_norm

TASK_OF_TOKENS = Task(id="t/1", prompt="p", tokens=(0, 1))
TASK = Task(id="t/0", prompt="p", tokens=(1, 2), label="x")


def rollout(index: int, reward: float, *, segments: tuple[int, ...] = (0,)) -> Rollout:
    """Three turns of 1, 2 and 3 tokens in sequences of 4, 5 and 6 tokens."""
    spans = [(2, 3, 0.0), (6, 8, 0.25), (12, 15, 0.0)]
    return Rollout(
        task=TASK,
        group_id=3,
        index=index,
        tokens=np.arange(15, dtype=np.int32) + 20 * index,
        spans=[
            Span(start=a, stop=b, version=1, finish_reason="stop", reward=r) for a, b, r in spans
        ],
        logprobs=-np.arange(1, 7, dtype=np.float32),
        text="text",
        finish_reason="stop",
        reward=reward,
        parts={"right": reward},
        segments=segments,
    )


def groups(*, split: bool) -> list[Group]:
    several = (0, 4, 9) if split else (0,)
    first = [rollout(0, 1.0, segments=several), rollout(1, 0.0), rollout(2, 0.5)]
    second = [rollout(0, 0.0), rollout(1, 2.0, segments=several[:2])]
    return [
        Group(id=3, task=TASK, rollouts=first),
        Group(id=4, task=TASK, rollouts=second),
    ]


def test_each_segment_is_a_sequence_with_positions_of_its_own() -> None:
    batch = make_batch(groups(split=True))
    assert batch.lengths.tolist() == [4, 5, 6, 15, 15, 15, 4, 11]
    assert batch.action_lengths.tolist() == [1, 2, 3, 6, 6, 6, 1, 5]
    assert batch.action_positions[:6].tolist() == [2, 2, 3, 3, 4, 5]
    assert batch.segments is not None
    assert batch.segments.tolist() == [3, 1, 1, 1, 2]
    assert (batch.rollout_count, batch.sequence_count) == (5, 8)
    assert batch.rollout_of.tolist() == [0, 0, 0, 1, 2, 3, 4, 4]
    assert batch.rollout_action_lengths.tolist() == [6] * 5
    assert batch.group.tolist() == [0, 0, 0, 1, 1]
    assert batch.turn[:6].tolist() == [0, 1, 1, 2, 2, 2]


def test_without_segments_a_batch_is_what_it_always_was() -> None:
    batch = make_batch(groups(split=False))
    assert batch.segments is None
    assert batch.rollout_action_lengths is batch.action_lengths


def test_everything_of_a_rollout_goes_to_the_same_share() -> None:
    batch = make_batch(groups(split=True))
    part = take(batch, np.array([4, 0]))
    assert part.lengths.tolist() == [4, 11, 4, 5, 6]
    assert part.segments is not None
    assert part.segments.tolist() == [2, 3]
    assert part.rewards.tolist() == [2.25, 1.25]
    assert part.tokens[:15].tolist() == list(range(20, 35))
    assert part.action_positions.tolist() == [2, 2, 3, 8, 9, 10, 2, 2, 3, 3, 4, 5]


@pytest.mark.parametrize("values", [False, True])
def test_estimators_see_the_rollout_once(values: bool) -> None:
    """Baselines, returns and advantages are those of the same tokens in one sequence."""
    found = []
    for split in (False, True):
        batch = make_batch(groups(split=split))
        batch = dataclasses.replace(batch, values=np.linspace(0, 1, 30, dtype=np.float32))
        inputs = estimator_inputs(batch, groups(split=split), {})
        assert inputs.sequence_count == 5
        found.append(estimate(gae if values else group_norm, inputs).advantages)
    assert torch.equal(*found)


def test_metrics_count_the_rollout_once() -> None:
    one, several = (rollout_metrics(groups(split=split)) for split in (False, True))
    assert several.pop("rollout/segments_mean") == (3 + 1 + 1 + 1 + 2) / 5
    assert one == several


def test_running_normalisation_counts_the_rollout_once() -> None:
    found = []
    for split in (False, True):
        norm = RunningNorm(None)
        batch = norm.apply(make_batch(groups(split=split)))
        found.append((norm.state_dict(), batch.rewards.tolist(), batch.token_rewards.tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("budget", [16, 10_000])
def test_the_loss_weighs_a_rollout_the_same_however_it_is_cut(
    aggregation: str, budget: int
) -> None:
    """Segments may end up in different micro-batches; their shares add up to the rollout's."""
    surrogate = torch.randn(30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    settings = ObjectiveSettings(aggregation=aggregation, sequence_norm=7)
    totals = []
    for split in (False, True):
        batch = make_batch(groups(split=split))
        batch = dataclasses.replace(batch, advantages=np.zeros(30, np.float32))
        counts = Denominators(tokens=batch.action_count, sequences=batch.rollout_count)
        total = torch.zeros((), dtype=torch.float64)
        for micro in make_micro_batches(batch, row_tokens=16, token_budget=budget):
            fields = micro_fields(batch, micro, torch.device("cpu"), "old_logprobs", "advantages")
            per_token = surrogate[torch.from_numpy(micro.actions)]
            fields["old_logprobs"] = per_token
            inputs = LossInputs(**fields, logprobs=per_token)
            total += aggregate(per_token, inputs, settings, counts)
        totals.append(total)
    torch.testing.assert_close(*totals)


def test_advantage_metrics_are_over_action_tokens() -> None:
    batch = make_batch(groups(split=True))
    batch = dataclasses.replace(batch, advantages=np.ones(30, np.float32))
    assert advantage_metrics(batch) == {"advantage/mean": 1.0, "advantage/std": 0.0}


def recorded(one: Rollout) -> dict[str, Any]:
    batch = make_batch([Group(id=3, task=TASK, rollouts=[one])])
    batch = dataclasses.replace(batch, advantages=np.ones(6, np.float32))
    (record,) = rollout_records(
        [Group(id=3, task=TASK, rollouts=[one])],
        batch,
        batch.rollout_logprobs,
        decode=lambda tokens: " ".join(map(str, tokens)),
        limit=None,
    )
    return json.loads(json.dumps(record))


def test_records_show_each_segments_own_prompt() -> None:
    one = dataclasses.replace(rollout(0, 1.0, segments=(0, 4, 9)), task=TASK_OF_TOKENS)
    shown = [(piece["kind"], piece["text"]) for piece in recorded(one)["episode"]]
    assert shown == [
        ("action", "2"),
        ("observation", "3"),
        ("prompt", "4 5"),
        ("action", "6 7"),
        ("observation", "8"),
        ("prompt", "9 10 11"),
        ("action", "12 13 14"),
    ]


def test_records_show_a_first_prompt_that_is_not_the_tasks() -> None:
    episode = recorded(rollout(0, 1.0))["episode"]
    assert (episode[0]["kind"], episode[0]["text"]) == ("prompt", "0 1")


def test_a_recorded_rollout_comes_back_with_its_segments() -> None:
    one = rollout(0, 1.0, segments=(0, 4, 9))
    ((again,),) = (group.rollouts for group in groups_of([recorded(one)]))
    assert list(again.segments) == [0, 4, 9]
    assert again.tokens.tolist() == one.tokens.tolist()
    assert make_batch([Group(id=3, task=TASK, rollouts=[again])]).lengths.tolist() == [4, 5, 6]


class Rank:
    """A rank that answers with what it was given, so that the join can be compared."""

    def __init__(self) -> None:
        self.taken: list[TrainBatch] = []

    async def call(self, method: str, given: Any, **_: Any) -> Any:
        if method == "score":
            self.taken.append(given)
            return given.rollout_logprobs
        self.taken += given
        logprobs = np.concatenate([part.rollout_logprobs for part in given])
        return UpdateResult(metrics={}, logprobs=logprobs)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("minibatch", [None, 2])
def test_ranks_are_given_whole_rollouts_and_their_answers_go_back(
    ranks: int, minibatch: int | None
) -> None:
    batch = make_batch(groups(split=True))
    distinct = np.arange(batch.action_count, dtype=np.float32)
    batch = dataclasses.replace(batch, rollout_logprobs=distinct)
    workers = [Rank() for _ in range(ranks)]
    learner = LearnerGroup(workers, LearnerConfig(minibatch_size=minibatch), seed=0)  # type: ignore[arg-type]
    assert asyncio.run(learner.score(batch)).tolist() == distinct.tolist()
    for worker in workers:
        worker.taken.clear()
    update = asyncio.run(learner.update(batch, step=0))
    assert update is not None
    assert update.logprobs is not None
    assert update.logprobs.tolist() == distinct.tolist()
    taken = [part for worker in workers for part in worker.taken]
    assert sum(part.rollout_count for part in taken) == 5
    assert all(set(part.rollout_action_lengths) <= {6} for part in taken)
