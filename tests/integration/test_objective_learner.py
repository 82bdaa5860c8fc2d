"""Every objective through the real learner: the gradient is the same however the rows are split."""

from __future__ import annotations

import multiprocessing
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import objective_ranks
import pytest
import torch
from learner_cases import free_port, relative_difference, write_model
from objective_cases import (
    OBJECTIVES,
    SPLIT,
    gradient_of,
    others_of,
    rows_for,
    started_objective,
    teacher_of,
)

from rlx.core.engine.learner.attention import Packing
from rlx.core.engine.learner.packing import make_micro_batches
from rlx.core.errors import ComponentError, NonFiniteError, RunInterrupted

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def whole(model: str) -> dict[str, Any]:
    """Gradient and metrics of each objective, in one packed micro-batch."""
    found = {}
    for name in OBJECTIVES:
        batch = rows_for(name)
        assert len(make_micro_batches(batch, row_tokens=64, token_budget=4096)) == 1
        learner = started_objective(model, name)
        found[name] = gradient_of(learner, batch, others_of(name, batch))
    return found


@pytest.mark.parametrize("name", OBJECTIVES)
def test_many_micro_batches_make_the_step_of_one(
    model: str, whole: dict[str, Any], name: str
) -> None:
    batch = rows_for(name)
    assert len(make_micro_batches(batch, **SPLIT)) >= 4
    gradient, metrics = gradient_of(
        started_objective(model, name, **SPLIT), batch, others_of(name, batch)
    )
    assert relative_difference(gradient, whole[name][0]) < TOLERANCE
    same_metrics(metrics, whole[name][1])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_rows_of_their_own_make_the_step_of_packed_ones(
    model: str, whole: dict[str, Any], name: str
) -> None:
    learner = started_objective(model, name, attention="sdpa")
    packing = learner._training._packing
    assert packing == Packing(several=True, whole=name in ("rm", "prm"))
    learner._training._packing = replace(packing, several=False)
    batch = rows_for(name)
    gradient, metrics = gradient_of(learner, batch, others_of(name, batch))
    assert relative_difference(gradient, whole[name][0]) < TOLERANCE
    same_metrics(metrics, whole[name][1])


@pytest.mark.parametrize("name", ["sft", "rm", "prm"])
def test_recomputed_activations_make_the_same_step(
    model: str, whole: dict[str, Any], name: str
) -> None:
    learner = started_objective(model, name, gradient_checkpointing=True, logprob_chunk=16)
    gradient, metrics = gradient_of(learner, rows_for(name), None)
    assert relative_difference(gradient, whole[name][0]) < TOLERANCE
    same_metrics(metrics, whole[name][1])


def same_metrics(ours: dict[str, float], theirs: dict[str, float]) -> None:
    names = {name for name in theirs if name.startswith("train/")}
    assert "train/loss" in names
    for name in names:
        assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name


def test_objectives_differ_from_one_another(whole: dict[str, Any]) -> None:
    losses = [round(metrics["train/loss"], 6) for _, metrics in whole.values()]
    assert len(set(losses)) == len(OBJECTIVES)


@pytest.fixture(scope="module")
def ranks(model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks observed (costs a start of two processes, about 25 s)."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    teacher_of(model)  # in a process group transformers writes a model on the first rank only
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=objective_ranks.main, args=(rank, port, model, str(folder)))
        for rank in range(objective_ranks.WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=200)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert not stuck
    seen = [pickle.loads((folder / f"rank-{rank}.pickle").read_bytes()) for rank in range(2)]
    failures = [one["traceback"] for one in seen if "traceback" in one]
    assert not failures, "\n".join(failures)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("name", OBJECTIVES)
def test_two_ranks_make_the_step_of_one(
    ranks: list[dict[str, Any]], whole: dict[str, Any], name: str
) -> None:
    for gradient, metrics in (one[name] for one in ranks):
        assert relative_difference(gradient, whole[name][0]) < TOLERANCE
        same_metrics(metrics, whole[name][1])


@pytest.mark.slow
def test_rank_without_a_row_takes_part(model: str, ranks: list[dict[str, Any]]) -> None:
    batch = rows_for("dpo", count=1)
    alone, _ = gradient_of(started_objective(model, "dpo"), batch, None)
    for gradient, _ in (one["fewer rows than ranks"] for one in ranks):
        assert relative_difference(gradient, alone) < TOLERANCE


@pytest.mark.parametrize(("name", "auto"), [("rm", "Sequence"), ("prm", "Token")])
def test_exported_head_gives_transformers_the_learners_numbers(
    model: str, tmp_path: Path, name: str, auto: str
) -> None:
    import transformers

    learner = started_objective(model, name)
    batch = rows_for(name)
    assert learner.update(batch, step=0) is not None
    ours = learner.score(batch)
    learner.export(str(tmp_path), {"rlx_reward_mean": 0.5})
    loader = getattr(transformers, f"AutoModelFor{auto}Classification")
    loaded = loader.from_pretrained(tmp_path).eval()
    assert loaded.config.rlx_reward_mean == 0.5
    assert loaded.config.pad_token_id == 0
    theirs = []
    tokens = np.split(batch.tokens, np.cumsum(batch.lengths)[:-1])
    positions = np.split(batch.action_positions, np.cumsum(batch.action_lengths)[:-1])
    for sequence, places in zip(tokens, positions, strict=True):
        with torch.no_grad():
            logits = loaded(input_ids=torch.from_numpy(sequence).long()[None]).logits[0]
        if name == "rm":
            theirs.append(logits[:1].numpy())
        else:
            theirs.append((logits[places, 1] - logits[places, 0]).numpy())
    assert ours == pytest.approx(np.concatenate(theirs), abs=1e-4)


def test_head_that_is_there_is_kept(model: str, tmp_path: Path) -> None:
    learner = started_objective(model, "rm")
    batch = rows_for("rm")
    assert learner.update(batch, step=0) is not None
    learner.export(str(tmp_path))
    again = started_objective(str(tmp_path), "rm", seed=7)
    assert again.score(batch) == pytest.approx(learner.score(batch), abs=1e-6)


def test_number_that_is_not_finite_names_its_row(model: str) -> None:
    learner = started_objective(model, "sft")

    def broken(x: Any) -> torch.Tensor:
        return torch.where(x.group == 2, torch.nan, 1.0)[x.sequence_index] * x.logprobs

    learner._objective = broken  # type: ignore[assignment]
    with pytest.raises(NonFiniteError, match="row 2 of made"):
        learner.update(rows_for("sft"), step=0)


def test_evaluation_measures_what_training_would(model: str) -> None:
    for name in ("dpo", "kto", "rm"):
        learner = started_objective(model, name, **SPLIT)
        batch = rows_for(name)
        others = others_of(name, batch)
        measured = learner.measure(batch, step=0, prefix="eval/made/", others=others)
        _, metrics = gradient_of(learner, batch, others)
        trained = {
            key.replace("train/", "eval/made/"): value
            for key, value in metrics.items()
            if key.replace("train/", "eval/made/") in measured
        }
        assert len(trained) == len(measured) > 2
        assert measured == pytest.approx(trained, rel=1e-5)


def test_evaluation_can_be_given_up_and_done_again(model: str) -> None:
    learner = started_objective(model, "sft", **SPLIT)
    usual = learner.measure(rows_for("sft"), step=0, prefix="eval/")
    learner.abort()
    with pytest.raises(RunInterrupted):
        learner.measure(rows_for("sft"), step=0, prefix="eval/")
    assert learner.measure(rows_for("sft"), step=0, prefix="eval/") == usual


def test_objective_that_fails_on_held_out_rows_is_named_as_the_cause(model: str) -> None:
    learner = started_objective(model, "sft")

    def broken(x: Any) -> torch.Tensor:
        raise ValueError("not here")

    learner._objective = broken  # type: ignore[assignment]
    with pytest.raises(ComponentError, match="ValueError: not here"):
        learner.measure(rows_for("sft"), step=0, prefix="eval/")


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["rm", "dpo"])
def test_bfloat16_and_zero_stages_take_the_same_step(
    model: str, whole: dict[str, Any], name: str, stage: int
) -> None:
    """The loss is that of float32 to bfloat16's three digits, and training lowers it."""
    learner = started_objective(model, name, zero_stage=stage, dtype="bfloat16", lr=1e-3)
    batch = rows_for(name)
    losses = []
    for step in range(4):
        result = learner.update(batch, step=step)
        assert result is not None
        losses.append(result.metrics["train/loss"])
    assert losses[0] == pytest.approx(whole[name][1]["train/loss"], rel=0.05)
    assert losses[-1] < losses[0]


def test_every_builtin_objective_is_tested() -> None:
    import rlx.plugins.objectives

    folder = Path(rlx.plugins.objectives.__path__[0])
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(OBJECTIVES)
