"""Every loss with every aggregation, through the real learner: gradients without steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
from learner_cases import random_batch

from rlx.core.engine.learner.learner import PolicyLearner
from rlx.core.objective import AGGREGATIONS, ObjectiveSettings
from rlx.core.references import ComponentRef
from rlx.core.rollouts import TrainBatch

LOSSES = (
    "ppo",
    "gspo",
    "cispo",
    "reinforce",
    "gmpo",
    "sapo",
    "dppo_tv",
    "dppo_kl",
    "clip_cov",
    "kl_cov",
)
PARAMETERS: dict[str, dict[str, Any]] = {
    # The defaults choose so few tokens that here it would be none.
    "clip_cov": {"fraction": 0.1, "cov_low": 0.0},
    "kl_cov": {"fraction": 0.1},
    "dppo_tv": {"delta": 0.004},
    "dppo_kl": {"delta": 0.002},
    "ppo": {"dual_clip": 3.0},
}
CASES = [(loss, aggregation) for loss in LOSSES for aggregation in AGGREGATIONS]
Weights = dict[str, np.ndarray]


def loss_named(name: str) -> Any:
    target = f"rlx.plugins.losses.{name}:{name}"
    params = PARAMETERS.get(name, {})
    return ComponentRef(kind="losses", name=name, target=target, params=params).resolve()


def settings_of(aggregation: str) -> ObjectiveSettings:
    return ObjectiveSettings(
        aggregation=aggregation, kl_coef=0.05, entropy_coef=0.01, sequence_norm=32
    )


def chosen(learner: PolicyLearner, loss: str, aggregation: str) -> PolicyLearner:
    """The learner with another loss and reduction."""
    learner._loss = loss_named(loss)
    learner._objective = settings_of(aggregation)
    return learner


def gradient(learner: PolicyLearner, batch: TrainBatch) -> Weights:
    """Gradient of one optimizer step, which is then not taken (ZeRO 0)."""
    model = learner._training.model
    found: Weights = {}

    def keep(rate: float) -> float:
        for name, parameter in model.module.named_parameters():
            found[name] = parameter.grad.detach().numpy().copy()
        model.discard()
        return 0.0

    model.step = keep  # type: ignore[method-assign]
    try:
        assert learner.update([batch], step=0) is not None
    finally:
        del model.step
    return found


def near_policy(learner: PolicyLearner) -> TrainBatch:
    """A batch whose old log-probs lie around the learner's own, on both sides of every clip."""
    batch = random_batch()
    rng = np.random.default_rng(5)
    noise = rng.normal(0, 0.3, batch.action_count).astype(np.float32)
    old = learner.score(batch) + noise
    return dataclasses.replace(batch, old_logprobs=old, rollout_logprobs=old - 0.1 * noise)


def twice(batch: TrainBatch) -> TrainBatch:
    """Every rollout two times; as denominators are counts, they double too."""

    def doubled() -> Iterator[tuple[str, np.ndarray | None]]:
        for item in dataclasses.fields(batch):
            value = getattr(batch, item.name)
            yield item.name, None if value is None else np.concatenate([value, value])

    return TrainBatch(**dict(doubled()))  # type: ignore[arg-type]
