"""What each of two ranks does in the tests of several ranks: one process a rank, many scenarios."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from invariance_cases import CASES, chosen, gradient, near_policy
from learner_cases import (
    PPO,
    random_batch,
    read_weights,
    save,
    sent_by,
    started,
)
from prefix_cases import grouped_batch, without_segments
from test_value_learner import change as critic_change
from test_value_learner import started as started_critic
from test_value_learner import value_batch

from rlx.core.config import LoraConfig
from rlx.core.engine.batches import take
from rlx.core.engine.learner.learner import PolicyLearner
from rlx.core.engine.shares import balanced_shares, batch_shares
from rlx.core.errors import RlxError
from rlx.core.inputs import LossInputs
from rlx.core.references import ComponentRef
from rlx.core.rollouts import TrainBatch

WORLD = 2
SPLIT = {"token_budget": 64, "row_tokens": 48}
Weights = dict[str, np.ndarray]


def share_of(batch: TrainBatch, rank: int) -> TrainBatch:
    return take(batch, balanced_shares(batch.lengths, WORLD)[rank])


def lopsided(batch: TrainBatch, rank: int) -> TrainBatch:
    """Rank 0 has one rollout, rank 1 the others."""
    return take(batch, np.arange(1) if rank == 0 else np.arange(1, batch.sequence_count))


def fails_on_rank_one(x: LossInputs) -> torch.Tensor:
    if torch.distributed.get_rank() == 1:
        raise ValueError("only here")
    return -x.advantages * x.logprobs


FAILING = ComponentRef(
    kind="losses", name="fails_on_rank_one", target=f"{__file__}:fails_on_rank_one"
)


class Rank:
    """One rank with everything that it observed, by name."""

    def __init__(self, model: str, folder: Path, rank: int, port: int) -> None:
        self.model, self.folder, self.rank, self.port = model, folder, rank, port
        self.reward_model = str(folder / "reward-model")
        self.seen: dict[str, Any] = {}

    def learner(self, **changes: Any) -> PolicyLearner:
        return started(self.model, rank=self.rank, world=WORLD, master_port=self.port, **changes)

    def update(self, learner: PolicyLearner, batch: TrainBatch, step: int = 0) -> Any:
        return learner.update([batch], step=step)

    def change(self, learner: PolicyLearner, batch: TrainBatch) -> Weights:
        before = read_weights(learner)
        assert self.update(learner, batch) is not None
        after = read_weights(learner)
        return {name: after[name] - before[name] for name in before}

    def stages(self) -> None:
        for stage in range(4):
            for budget in (4096, 48):
                learner = self.learner(zero_stage=stage, token_budget=budget)
                mine = share_of(random_batch(), self.rank)
                self.seen[f"change {stage} {budget}"] = self.change(learner, mine)

    def adapters(self) -> None:
        """Two steps, with a look at the reference between them."""
        for stage in (0, 2, 3):
            learner = self.learner(zero_stage=stage, lora=LoraConfig(rank=4))
            mine = share_of(random_batch(), self.rank)
            before = read_weights(learner)
            self.update(learner, mine)
            self.seen[f"reference {stage}"] = learner.score(mine, as_it_started=True)
            self.update(learner, mine, 1)
            after = read_weights(learner)
            self.seen[f"adapters {stage}"] = {name: after[name] - before[name] for name in before}

    def uneven(self) -> None:
        """Rank 0 runs idle micro-batches, and has fewer pieces of the projection to do."""
        for stage in (0, 3):
            learner = self.learner(zero_stage=stage, token_budget=48, logprob_chunk=8)
            mine = lopsided(random_batch(), self.rank)
            self.seen[f"uneven {stage}"] = self.change(learner, mine)
            self.seen[f"uneven score {stage}"] = learner.score(mine)
            nothing = take(mine, np.zeros(0, np.int64)) if self.rank == 0 else mine
            self.seen[f"empty {stage}"] = self.update(learner, nothing) is not None

    def metrics(self) -> None:
        learner = self.learner(token_budget=128)
        result = self.update(learner, share_of(random_batch(), self.rank))
        self.seen["metrics"] = dict(result.metrics)

    def checkpoint(self) -> None:
        for stage in range(4):
            learner = self.learner(zero_stage=stage, schedule="linear")
            self.update(learner, share_of(random_batch(0), self.rank))
            save(learner, self.folder / f"two-{stage}")
            self.update(learner, share_of(random_batch(1), self.rank))
            self.seen[f"straight {stage}"] = read_weights(learner)
        torch.distributed.barrier()
        for stage in range(4):
            learner = self.learner(zero_stage=stage, schedule="linear")
            for source in sorted(
                path for pattern in ("one-?", "two-?") for path in self.folder.glob(pattern)
            ):
                learner.load(str(source))
                save(learner, self.folder / f"{source.name}-by-two-{stage}")
                if source.name in (f"two-{stage}", f"one-{(stage + 1) % 4}"):
                    self.update(learner, share_of(random_batch(1), self.rank))
                    self.seen[f"{source.name} resumed {stage}"] = read_weights(learner)

    def abort(self) -> None:
        """Only rank 1 is asked to give up."""
        for stage in (1, 3):
            learner = self.learner(zero_stage=stage, token_budget=48)
            if self.rank == 1:
                learner.abort()
            mine = share_of(random_batch(), self.rank)
            self.seen[f"aborted {stage}"] = self.update(learner, mine) is None
            self.seen[f"after abort {stage}"] = self.change(learner, mine)

    def failure(self) -> None:
        learner = self.learner(loss=FAILING, token_budget=48)
        mine = share_of(random_batch(), self.rank)
        try:
            self.update(learner, mine)
        except RlxError as error:
            self.seen["error"] = str(error)
        healthy = self.learner(loss=PPO)
        learner._loss = healthy._loss
        self.seen["after error"] = self.change(learner, mine)

    def losses(self) -> None:
        """Every loss with every aggregation; rank 1 has more micro-batches than rank 0."""
        learner = self.learner(zero_stage=0, **SPLIT)
        mine = share_of(near_policy(learner), self.rank)
        for loss, aggregation in CASES:
            found = gradient(chosen(learner, loss, aggregation), mine)
            self.seen[f"gradient {loss} {aggregation}"] = found

    def shared(self) -> None:
        """Groups share their prompts on the rank where they are."""
        batch = without_segments(grouped_batch(2))
        share = batch_shares(batch, WORLD, shared_prefix=True)[self.rank]
        for stage in (0, 3):
            learner = self.learner(zero_stage=stage, shared_prefix="on", token_budget=96)
            self.seen[f"shared {stage}"] = self.change(learner, take(batch, share))
            if stage == 0:
                fresh = self.learner(shared_prefix="on", zero_stage=0)
                self.seen["shared gradient"] = gradient(fresh, take(batch, share))

    def critic(self) -> None:
        """The critic beside the policy, in the same process group."""
        beside = self.learner(zero_stage=1)
        for stage in (0, 2, 3):
            seat = {"rank": self.rank, "world": WORLD, "master_port": self.port}
            critic = started_critic(self.reward_model, zero_stage=stage, token_budget=64, **seat)
            mine = share_of(value_batch(), self.rank)
            self.seen[f"critic {stage}"] = critic_change(critic, mine)
            assert self.update(beside, share_of(random_batch(), self.rank)) is not None

    def files(self) -> None:
        learner = self.learner(zero_stage=3)
        self.seen["sent"] = sent_by(learner, 3)
        learner.export(str(self.folder / "export"))


def main(rank: int, port: int, model: str, folder: str) -> None:
    """Entry point of a spawned rank."""
    state = Rank(model, Path(folder), rank, port)
    scenarios: list[Callable[[], None]] = [
        state.stages,
        state.adapters,
        state.uneven,
        state.metrics,
        state.checkpoint,
        state.abort,
        state.failure,
        state.losses,
        state.shared,
        state.critic,
        state.files,
    ]
    try:
        for scenario in scenarios:
            scenario()
        torch.distributed.barrier()
    except BaseException:
        state.seen["traceback"] = traceback.format_exc()
    with (Path(folder) / f"rank-{rank}.pickle").open("wb") as file:
        pickle.dump(state.seen, file)
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads sometimes abort an ordinary exit of the interpreter.
    os._exit(0)
