"""The policy learner: one rank that turns batches into optimizer steps.

An update is a list of batches, one for each optimizer step in order. Each is packed into
micro-batches, and each of those goes through

    log-probs → objective → gradient per token → backward

before the gradients of all micro-batches and ranks make one step.
"""

from __future__ import annotations

import functools
import resource
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlx.core.config import LearnerConfig
from rlx.core.engine.interfaces import UpdateResult, WeightsFile
from rlx.core.engine.learner.checkpoint import load_learner, save_learner
from rlx.core.engine.learner.distributed import (
    gather,
    highest,
    join_group,
    leave_group,
    local_device,
)
from rlx.core.engine.learner.gradients import (
    TokenGradients,
    differentiate,
    loss_inputs,
    no_gradients,
)
from rlx.core.engine.learner.model import load_policy
from rlx.core.engine.learner.packing import MicroBatch
from rlx.core.engine.learner.planning import Plan, make_plan
from rlx.core.engine.learner.schedule import learning_rate
from rlx.core.engine.learner.scorer import score_batch
from rlx.core.engine.learner.sharded import ShardedPolicy
from rlx.core.engine.learner.weights_file import export_model, write_weights
from rlx.core.errors import EngineError, RlxError
from rlx.core.objective import MetricSums, ObjectiveSettings, policy_objective
from rlx.core.references import Bound, ComponentRef
from rlx.core.rollouts import TrainBatch


class PolicyLearner:
    """One rank of the data-parallel group that trains the policy (`interfaces.Learner`)."""

    def __init__(
        self,
        *,
        model: str,
        settings: LearnerConfig,
        objective: ObjectiveSettings,
        loss: ComponentRef,
        correction: ComponentRef,
        temperature: float,
        total_updates: int,
        rank: int,
        world: int,
        master_port: int,
        threads: int,
        seed: int,
        master_address: str = "127.0.0.1",
    ) -> None:
        self._model = model
        self._settings = settings
        self._objective = objective
        self._loss_ref, self._correction_ref = loss, correction
        self._temperature = temperature
        self._total_updates = total_updates
        self._rank, self._world = rank, world
        self._address, self._port = master_address, master_port
        self._threads = threads
        self._seed = seed
        self._updates = 0
        self._abort = threading.Event()

    def start(self) -> Mapping[str, Any]:
        torch.set_num_threads(self._threads)
        torch.manual_seed(self._seed + self._rank)
        join_group(rank=self._rank, world=self._world, address=self._address, port=self._port)
        self._loss: Bound = self._loss_ref.resolve()
        self._correction: Bound = self._correction_ref.resolve()
        loaded = load_policy(self._model, self._settings, self._temperature, local_device())
        parameters = [p.numel() for p in loaded.policy.parameters()]
        self._packed = loaded.packable
        self._policy = ShardedPolicy(
            loaded.policy, self._settings, dtype=loaded.dtype, world=self._world
        )
        return {
            "parameters": sum(parameters),
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": local_device().type,
            "zero_stage": self._policy.stage,
            "packed": loaded.packable,
        }

    def score(self, batch: TrainBatch) -> np.ndarray:
        plan = make_plan(batch, self._settings, packed=self._packed)
        return score_batch(self._policy.forward, batch, plan)

    def update(self, batches: Sequence[TrainBatch], *, step: int) -> UpdateResult | None:
        if len(batches) > 1 and any(batch.old_logprobs is None for batch in batches):
            raise EngineError("several optimizer steps on a batch need its old log-probs")
        metrics, norms, logprobs = MetricSums(), [], []
        rate = 0.0
        try:
            for index, batch in enumerate(batches):
                plan = make_plan(batch, self._settings, packed=self._packed)
                passed = self._accumulate(batch, plan, metrics, step=step, may_abort=index == 0)
                if passed is None:
                    return None
                logprobs.append(passed)
                rate = learning_rate(self._settings, self._updates, self._total_updates)
                norms.append(self._policy.step(rate))
                self._updates += 1
        finally:
            self._abort.clear()
        first_epoch = logprobs[: len(batches) // self._settings.epochs]
        return UpdateResult(
            metrics={
                **_over_ranks(metrics).metrics(),
                "policy/grad_norm": float(np.mean(norms)),
                "policy/lr": rate,
                "memory/learner_gib": highest(_peak_gib())[0],
            },
            logprobs=np.concatenate(first_epoch),
        )

    def _accumulate(
        self, batch: TrainBatch, plan: Plan, metrics: MetricSums, *, step: int, may_abort: bool
    ) -> np.ndarray | None:
        """Gradients of one optimizer step; returns log-probs [N], or None when given up."""
        passed = np.zeros(batch.action_count, np.float32)
        extra = {**_step_statistics(batch), "metadata": {"step": step}}
        last = len(plan.micro_batches) - 1
        with_entropy = self._objective.entropy_coef > 0
        for index, micro in enumerate(plan.micro_batches):
            logprobs, entropy = self._policy.forward(
                micro, chunks=plan.chunks[index], entropy_gradient=with_entropy
            )
            passed[micro.actions] = logprobs.detach().cpu().numpy()
            gradients, error = self._differentiate(batch, micro, plan, logprobs, entropy, extra)
            if not self._go_on(error, may_abort=may_abort):
                return None
            loss = (logprobs * gradients.logprobs).sum()
            if with_entropy:
                loss = loss + (entropy * gradients.entropy).sum()
            self._policy.backward(loss, last=index == last)
            metrics.add(gradients.metrics)
        return passed

    def _differentiate(
        self,
        batch: TrainBatch,
        micro: MicroBatch,
        plan: Plan,
        logprobs: Tensor,
        entropy: Tensor,
        extra: Mapping[str, Any],
    ) -> tuple[TokenGradients, RlxError | None]:
        """Gradients per token, or zeros with the error that stopped them."""
        nothing = no_gradients(logprobs)
        if not micro.action_count:
            return nothing, None
        compute = functools.partial(
            policy_objective,
            loss=self._loss,
            correction=self._correction,
            settings=self._objective,
            denominators=plan.denominators,
        )
        try:
            inputs = loss_inputs(batch, micro, logprobs, entropy, extra)
            return differentiate(compute, inputs, batch, micro), None
        except RlxError as error:
            return nothing, error

    def _go_on(self, error: RlxError | None, *, may_abort: bool) -> bool:
        """Agree with the other ranks whether to go on; raises the first failed rank's error."""
        failed, given_up = highest(error is not None, may_abort and self._abort.is_set())
        if failed or given_up:
            self._policy.discard()
        if failed:
            raise next(found for found in gather(error) if found is not None)
        return not given_up

    def abort(self) -> None:
        self._abort.set()

    def write_weights(self, path: str, version: int) -> WeightsFile | None:
        return write_weights(self._policy, path, version, writer=self._rank == 0)

    def save(self, folder: str) -> None:
        components = {"loss": self._loss, "correction": self._correction}
        save_learner(
            self._policy,
            folder,
            rank=self._rank,
            world=self._world,
            updates=self._updates,
            components={name: bound.state_dict() for name, bound in components.items()},
        )

    def load(self, folder: str) -> None:
        self._updates, components = load_learner(
            self._policy, folder, rank=self._rank, world=self._world
        )
        self._loss.load_state_dict(components["loss"])
        self._correction.load_state_dict(components["correction"])

    def export(self, folder: str) -> None:
        export_model(self._policy, self._model, folder, writer=self._rank == 0)

    def stop(self) -> None:
        leave_group()


def _step_statistics(batch: TrainBatch) -> dict[str, Tensor]:
    """Old log-probs and advantages of the whole optimizer step, for losses that rank tokens."""
    if batch.old_logprobs is None or batch.advantages is None:
        return {}
    everyone = gather((batch.old_logprobs, batch.advantages))
    old, advantages = (np.concatenate(parts) for parts in zip(*everyone, strict=True))
    return {
        "step_old_logprobs": torch.from_numpy(old).to(local_device()),
        "step_advantages": torch.from_numpy(advantages).to(local_device()),
    }


def _over_ranks(metrics: MetricSums) -> MetricSums:
    """An idle rank has no entries, so parts are merged by name."""
    merged = MetricSums()
    for part in gather(metrics):
        merged.add(part)
    return merged


def _peak_gib() -> float:
    """Peak memory of this rank: of the accelerator, else of the process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    # Linux counts in KiB, macOS in bytes.
    unit = 2**30 if sys.platform == "darwin" else 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
