"""Objectives on whole distributions: pieces change nothing, and the teacher is left as it is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import VOCABULARY, read_weights, relative_difference, save, write_model
from torch import Tensor

from rlx.core.component import component
from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.logit_learner import LogitLearner
from rlx.core.engine.learner.logit_pieces import LogitPieces, Values
from rlx.core.engine.learner.model import PackedPolicy
from rlx.core.engine.learner.packing import make_micro_batches
from rlx.core.engine.learner.sharded import on_device
from rlx.core.errors import ComponentError, RlxError
from rlx.core.offline.inputs import ObjectiveInputs
from rlx.core.offline.rows import RowBatch
from rlx.core.references import ComponentRef

pytestmark = pytest.mark.engine
DISTILL = ComponentRef(
    kind="objectives", name="distill", target="rlx.plugins.objectives.distill:distill"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("student"), seed=0)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("teacher"), seed=1)


def rows(count: int = 9, seed: int = 0) -> RowBatch:
    """Prompts with a completion, every third with a second one."""
    rng = np.random.default_rng(seed)
    tokens, positions = [], []
    for index in range(count):
        trained = [False] * int(rng.integers(2, 6)) + [True] * int(rng.integers(1, 15))
        trained += ([False] * 3 + [True] * 4) if index % 3 == 0 else []
        tokens.append(rng.integers(3, VOCABULARY, len(trained)))
        positions.append(np.flatnonzero(trained))
    return RowBatch(
        tokens=np.concatenate(tokens).astype(np.int32),
        lengths=np.array([len(row) for row in tokens], np.int64),
        action_lengths=np.array([len(row) for row in positions], np.int64),
        action_positions=np.concatenate(positions).astype(np.int64),
        turn=np.zeros(sum(map(len, positions)), np.int64),
        number=np.arange(count),
        source=np.zeros(count, np.int64),
        sources=("rows",),
    )


def started(student: str, teacher: str | None, **changes: Any) -> LogitLearner:
    objective = changes.pop("objective", DISTILL)
    own = {"lr": 1e-2, "row_tokens": 64, "dtype": "float32", **changes}
    learner = LogitLearner(
        model=student,
        settings=LearnerConfig(**own),
        objective=objective,
        teacher=teacher,
        pad_token_id=None,
        total_updates=10,
        rank=0,
        world=1,
        master_port=0,
        threads=1,
        seed=0,
    )
    learner.start()
    return learner


def change(learner: LogitLearner, batch: RowBatch) -> dict[str, np.ndarray]:
    before = read_weights(learner)  # type: ignore[arg-type]
    assert learner.update(batch, step=1) is not None
    after = read_weights(learner)  # type: ignore[arg-type]
    return {name: after[name] - before[name] for name in before}


def double(folder: str) -> PackedPolicy:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return PackedPolicy(model, 1.0).eval()


def loops(student: PackedPolicy, teacher: PackedPolicy, batch: RowBatch) -> Tensor:
    """Σ over tokens of KL(teacher ‖ student) + ½ Σ_v q log(q/p), sequence by sequence."""
    total = torch.zeros((), dtype=torch.float64)
    start = at = 0
    for length, count in zip(batch.lengths, batch.action_lengths, strict=True):
        tokens = torch.from_numpy(batch.tokens[start : start + length].astype(np.int64))[None]
        q = student.model(input_ids=tokens).logits[0].log_softmax(-1)
        p = teacher.model(input_ids=tokens).logits[0].log_softmax(-1).detach()
        for place in batch.action_positions[at : at + count] - 1:
            for word in range(VOCABULARY):
                gap = p[place, word] - q[place, word]
                total = total + p[place, word].exp() * gap - 0.5 * q[place, word].exp() * gap
        start, at = start + int(length), at + int(count)
    return total


def mixed(_: slice, logits: Tensor, theirs: Tensor | None) -> Values:
    assert theirs is not None
    q, p = logits.log_softmax(-1), theirs.log_softmax(-1)
    loss = (p.exp() * (p - q)).sum(-1) + 0.5 * (q.exp() * (q - p)).sum(-1)
    return loss, {"one": torch.ones_like(loss)}


@pytest.mark.parametrize("chunks", [1, 4, 500])
def test_gradients_are_those_of_loops_over_whole_logits(
    student: str, teacher: str, chunks: int
) -> None:
    own, theirs, batch = double(student), double(teacher), rows(4)
    expected = loops(own, theirs, batch)
    wanted = torch.autograd.grad(expected, list(own.parameters()))
    module = LogitPieces(own)
    (micro,) = make_micro_batches(batch, row_tokens=64, token_budget=4096)
    sizes: list[int] = []

    def objective(place: slice, logits: Tensor, other: Tensor | None) -> Values:
        sizes.append(logits.shape[0])
        return mixed(place, logits, other)

    metrics: list[Mapping[str, Tensor]] = []
    errors: list[RlxError] = []
    (values,) = module(
        *on_device(micro, CPU),
        chunks=chunks,
        objective=objective,
        teacher=theirs,
        errors=errors,
        metrics=metrics,
    )
    assert values.sum().item() == pytest.approx(expected.item(), rel=1e-12)
    found = torch.autograd.grad(values.sum(), list(own.parameters()))
    for ours, reference in zip(found, wanted, strict=True):
        assert torch.allclose(ours, reference, rtol=1e-6, atol=1e-11)
    assert max(sizes) <= -(-batch.action_count // chunks)
    assert sum(part["one"].sum().item() for part in metrics if part) == batch.action_count
    assert all(parameter.grad is None for parameter in theirs.parameters())


def test_packing_and_pieces_do_not_change_an_update(student: str, teacher: str) -> None:
    batch = rows()
    whole = change(started(student, teacher, logprob_chunk=10_000), batch)
    for settings in (
        {"logprob_chunk": 5},
        {"token_budget": 16, "row_tokens": 16},
        {"token_budget": 32, "logprob_chunk": 3, "gradient_checkpointing": True},
    ):
        other = change(started(student, teacher, **settings), batch)
        assert relative_difference(other, whole) < 5e-5


def test_measuring_gives_the_loss_of_the_update_and_changes_nothing(
    student: str, teacher: str
) -> None:
    learner, batch = started(student, teacher), rows()
    before = read_weights(learner)  # type: ignore[arg-type]
    measured = learner.measure(batch, step=1, prefix="eval/rows/")
    after = read_weights(learner)  # type: ignore[arg-type]
    assert all((before[name] == after[name]).all() for name in before)
    result = learner.update(batch, step=1)
    assert result is not None
    for name in ("loss", "agreement", "nll"):
        value = result.metrics[f"train/{name}"]
        assert measured[f"eval/rows/{name}"] == pytest.approx(value, rel=1e-6)
    again = learner.measure(batch, step=2, prefix="eval/rows/")
    assert again["eval/rows/loss"] < measured["eval/rows/loss"]


def test_a_student_becomes_its_teacher(student: str, teacher: str) -> None:
    learner, batch = started(student, teacher, lr=5e-3), rows()
    first = learner.measure(batch, step=0, prefix="eval/rows/")
    for step in range(25):
        learner.update(batch, step=step)
    last = learner.measure(batch, step=25, prefix="eval/rows/")
    assert last["eval/rows/loss"] < 0.3 * first["eval/rows/loss"]
    assert last["eval/rows/agreement"] > first["eval/rows/agreement"]


def test_the_teacher_is_not_in_the_checkpoint(student: str, teacher: str, tmp_path: Path) -> None:
    learner, batch = started(student, teacher), rows()
    learner.update(batch, step=0)
    (tmp_path / "checkpoint").mkdir()
    save(learner, str(tmp_path / "checkpoint"))
    learner.export(str(tmp_path / "export"))
    from safetensors.torch import load_file

    exported = load_file(tmp_path / "export/model.safetensors")
    original = load_file(Path(student) / "model.safetensors")
    assert exported.keys() == original.keys()
    expected = change(learner, batch)
    other = started(student, teacher)
    other.load(str(tmp_path / "checkpoint"))
    assert relative_difference(change(other, batch), expected) == 0


def test_a_larger_padded_vocabulary_is_cut_to_what_is_shared(student: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(student)
    model.resize_token_embeddings(VOCABULARY + 8)
    model.save_pretrained(tmp_path)
    learner = started(student, str(tmp_path))
    measured = learner.measure(rows(), step=0, prefix="eval/rows/")
    assert measured["eval/rows/loss"] == pytest.approx(0.0, abs=1e-6)
    assert measured["eval/rows/agreement"] == 1.0


@component(head="logits", per="token")
def wrong_shape(x: ObjectiveInputs) -> Tensor:
    return x.logits.sum()


@component(head="logits", per="token")
def changes_its_input(x: ObjectiveInputs) -> Tensor:
    x.targets.add_(1)
    return x.logits.logsumexp(-1)


@component(head="logits", per="token")
def fails_itself(x: ObjectiveInputs) -> Tensor:
    raise ValueError("fails_itself")


@pytest.mark.parametrize("name", ["wrong_shape", "changes_its_input", "fails_itself"])
def test_a_wrong_objective_is_named_and_moves_no_weight(student: str, name: str) -> None:
    ref = ComponentRef(kind="objectives", name=name, target=f"{__file__}:{name}")
    learner = started(student, None, objective=ref)
    before = read_weights(learner)  # type: ignore[arg-type]
    with pytest.raises(ComponentError, match=name):
        learner.update(rows(), step=0)
    with pytest.raises(ComponentError, match=name):
        learner.measure(rows(), step=0, prefix="eval/rows/")
    after = read_weights(learner)  # type: ignore[arg-type]
    assert all((before[key] == after[key]).all() for key in before)
