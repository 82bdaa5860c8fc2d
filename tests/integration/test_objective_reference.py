"""The whole step against transformers in float64: row by row, no packing, formulas in loops."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import relative_difference, write_model
from objective_cases import gradient_of, others_of, rows_for, started_objective
from torch import Tensor
from torch.nn.functional import logsigmoid

from rlx.core.offline.rows import RowBatch

pytestmark = pytest.mark.engine
TOLERANCE = 1e-4
"""Of gradients in float32 against those in float64."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def sequences(batch: RowBatch) -> list[tuple[Tensor, Tensor, Any]]:
    """Tokens, trained positions and reference log-probs of each sequence."""
    tokens = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    ends = np.cumsum(batch.action_lengths)[:-1]
    places = np.split(batch.action_positions, ends)
    reference = batch.ref_logprobs
    known = [None] * len(tokens) if reference is None else np.split(reference, ends)
    return [
        (torch.from_numpy(one).long(), torch.from_numpy(at), ref)
        for one, at, ref in zip(tokens, places, known, strict=True)
    ]


def logprobs(net: Any, tokens: Tensor, places: Tensor) -> Tensor:
    every = torch.log_softmax(net(input_ids=tokens[None]).logits[0], -1)
    return torch.stack([every[place - 1, tokens[place]] for place in places.tolist()])


def log_ratio(net: Any, tokens: Tensor, places: Tensor, reference: Any) -> Tensor:
    return logprobs(net, tokens, places).sum() - float(np.sum(reference, dtype=np.float64))


def sft_loss(net: Any, batch: RowBatch, others: RowBatch | None) -> Tensor:
    parts = [logprobs(net, tokens, places) for tokens, places, _ in sequences(batch)]
    return -torch.cat(parts).sum() / batch.action_count


def dpo_loss(net: Any, batch: RowBatch, others: RowBatch | None) -> Tensor:
    """With the parameters of `objective_cases`."""
    total = torch.zeros((), dtype=torch.float64)
    rows = sequences(batch)
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        h = 0.3 * (log_ratio(net, *chosen) - log_ratio(net, *rejected))
        total = total - 0.9 * logsigmoid(h) - 0.1 * logsigmoid(-h)
        total = total - 0.2 * logprobs(net, *chosen[:2]).mean()
    return total / batch.rollout_count


def kto_loss(net: Any, batch: RowBatch, others: RowBatch | None) -> Tensor:
    assert others is not None
    assert batch.desirable is not None
    with torch.no_grad():
        kl = sum(log_ratio(net, *row) for row in sequences(others)) / others.rollout_count
    z = max(float(kl), 0.0)
    total = torch.zeros((), dtype=torch.float64)
    for row, desirable in zip(sequences(batch), batch.desirable, strict=True):
        above = 0.1 * (log_ratio(net, *row) - z)
        if desirable:
            total = total + 1 - torch.sigmoid(above)
        else:
            total = total + 0.7 * (1 - torch.sigmoid(-above))
    return total / batch.rollout_count


def rm_loss(net: Any, batch: RowBatch, others: RowBatch | None) -> Tensor:
    assert batch.margin is not None
    total = torch.zeros((), dtype=torch.float64)
    scores = [net(input_ids=tokens[None]).logits[0, 0] for tokens, _, _ in sequences(batch)]
    for c, r, margin in zip(scores[::2], scores[1::2], batch.margin, strict=True):
        total = total - logsigmoid(c - r - margin) + 0.05 * (c + r) ** 2
    return total / batch.rollout_count


def prm_loss(net: Any, batch: RowBatch, others: RowBatch | None) -> Tensor:
    assert batch.labels is not None
    labels = iter(batch.labels.tolist())
    total = torch.zeros((), dtype=torch.float64)
    for tokens, places, _ in sequences(batch):
        every = torch.log_softmax(net(input_ids=tokens[None]).logits[0], -1)
        for place in places.tolist():
            total = total - every[place, int(next(labels))]
    return total / batch.action_count


LOSSES: dict[str, tuple[str, Callable[[Any, RowBatch, RowBatch | None], Tensor]]] = {
    "sft": ("CausalLM", sft_loss),
    "dpo": ("CausalLM", dpo_loss),
    "kto": ("CausalLM", kto_loss),
    "rm": ("SequenceClassification", rm_loss),
    "prm": ("TokenClassification", prm_loss),
}


@pytest.mark.parametrize("name", LOSSES)
def test_step_is_that_of_transformers_in_float64(model: str, tmp_path: Path, name: str) -> None:
    import transformers

    task, loss_of = LOSSES[name]
    learner = started_objective(model, name, token_budget=128, row_tokens=64)
    batch = rows_for(name)
    others = others_of(name, batch)
    learner.export(str(tmp_path))  # with the head that was drawn
    gradient, metrics = gradient_of(learner, batch, others)
    loader = getattr(transformers, f"AutoModelFor{task}")
    net = loader.from_pretrained(tmp_path, dtype=torch.float64).eval()
    loss = loss_of(net, batch, others)
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    theirs = {
        f"model.{key}": parameter.grad.numpy()
        for key, parameter in net.named_parameters()
        if parameter.grad is not None
    }
    assert relative_difference(gradient, theirs) < TOLERANCE
