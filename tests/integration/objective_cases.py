"""Random rows, learners and gradients for the tests of offline training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from learner_cases import VOCABULARY, learner_arguments, write_model

from rlx.core.component import tags_of
from rlx.core.engine.learner.logit_learner import LogitLearner
from rlx.core.engine.learner.objective_learner import ObjectiveLearner
from rlx.core.offline.mismatched import mismatched
from rlx.core.offline.needs import needs_of
from rlx.core.offline.rows import RowBatch
from rlx.core.references import ComponentRef

OBJECTIVES = ("sft", "rm", "prm", "dpo", "ipo", "simpo", "orpo", "kto", "distill")
PARAMETERS: dict[str, dict[str, Any]] = {
    "rm": {"center": 0.05},
    "dpo": {"beta": 0.3, "label_smoothing": 0.1, "nll_coef": 0.2},
    "kto": {"undesirable_weight": 0.7},
}
SPLIT = {"token_budget": 64, "row_tokens": 48}
Weights = dict[str, np.ndarray]


def objective_ref(name: str) -> ComponentRef:
    return ComponentRef(
        kind="objectives",
        name=name,
        target=f"rlx.plugins.objectives.{name}:{name}",
        params=PARAMETERS.get(name, {}),
    )


def rows_for(name: str, *, seed: int = 0, count: int = 12) -> RowBatch:
    """Rows of the kind that an objective reads, with made-up log-probs of a reference."""
    needs = needs_of(objective_ref(name).resolve())
    rng = np.random.default_rng(seed)
    per_row = 2 if needs.data == "pairs" else 1
    tokens, positions = [], []
    for _ in range(count):
        prompt = rng.integers(3, VOCABULARY, int(rng.integers(2, 9)))
        for _ in range(per_row):
            answer = rng.integers(3, VOCABULARY, int(rng.integers(1, 20)))
            sequence = np.concatenate([prompt, answer])
            trained = np.arange(len(prompt), len(sequence))
            if needs.head == "score":
                trained = trained[-1:]
            elif needs.data == "steps":
                trained = trained[::-4][::-1]
            tokens.append(sequence)
            positions.append(trained)
    N = sum(len(trained) for trained in positions)
    batch = RowBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.array([len(one) for one in tokens], np.int64),
        action_lengths=np.array([len(one) for one in positions], np.int64),
        action_positions=np.concatenate(positions).astype(np.int64),
        turn=np.zeros(N, np.int64),
        number=np.arange(count),
        source=np.zeros(count, np.int64),
        sources=("made",),
        per_row=per_row,
        margin=rng.uniform(0, 1, count) if needs.data == "pairs" else None,
        desirable=rng.random(count) < 0.5 if needs.data == "unpaired" else None,
        labels=rng.integers(0, 2, N).astype(np.float64) if needs.data == "steps" else None,
    )
    return with_reference(batch, seed) if "ref_logprobs" in needs.requires else batch


def with_reference(batch: RowBatch, seed: int) -> RowBatch:
    drawn = np.random.default_rng(seed + 100).normal(3.0, 1.0, batch.action_count)
    return dataclasses.replace(batch, ref_logprobs=-np.abs(drawn).astype(np.float32))


def others_of(name: str, batch: RowBatch) -> RowBatch | None:
    """Mismatched rows where the objective requires them."""
    if "kl_baseline" not in tags_of(objective_ref(name).load()).requires:
        return None
    return with_reference(mismatched(dataclasses.replace(batch, ref_logprobs=None), 256), 1)


def started_objective(model: str, name: str, **changes: Any) -> ObjectiveLearner:
    given = learner_arguments(model, **changes)
    for other in ("objective", "loss", "correction", "temperature"):
        del given[other]
    given |= {"objective": objective_ref(name), "pad_token_id": 0}
    pieces = needs_of(given["objective"].resolve()).head == "logits"
    learner = (
        LogitLearner(**given, teacher=teacher_of(model)) if pieces else ObjectiveLearner(**given)
    )
    learner.start()
    return learner


def teacher_of(model: str) -> str:
    """Another random model of the same shape, written when first asked for."""
    folder = Path(model).with_name(f"{Path(model).name}-teacher")
    if not folder.exists():
        write_model(folder, seed=1)
    return str(folder)


def gradient_of(
    learner: ObjectiveLearner, batch: RowBatch, others: RowBatch | None
) -> tuple[Weights, dict[str, float]]:
    """Gradient of one optimizer step, which is then not taken (ZeRO 0), and its metrics."""
    model = learner._training.model
    found: Weights = {}

    def keep(rate: float) -> float:
        for name, parameter in model.module.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.detach().numpy().copy()
        model.discard()
        return 0.0

    model.step = keep  # type: ignore[method-assign]
    try:
        result = learner.update(batch, step=0, others=others)
        assert result is not None
    finally:
        del model.step
    return found, dict(result.metrics)
