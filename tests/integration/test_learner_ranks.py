"""Two DeepSpeed ranks in processes of their own do what one rank does."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import learner_ranks
import numpy as np
import pytest
from invariance_cases import CASES, chosen, gradient, near_policy
from learner_cases import (
    changed_by,
    free_port,
    random_batch,
    read_weights,
    relative_difference,
    save,
    saved_state,
    started,
    write_model,
)
from prefix_cases import grouped_batch, without_segments
from test_value_learner import TOLERANCE as CRITIC_TOLERANCE
from test_value_learner import change as critic_change
from test_value_learner import started as started_critic
from test_value_learner import value_batch, write_reward_model

from rlx.core.config import LoraConfig
from rlx.core.engine.batches import ragged_indices
from rlx.core.engine.shares import balanced_shares

pytestmark = [pytest.mark.engine, pytest.mark.slow]
TOLERANCE = 5e-5
RESUMED = 1e-4
"""Most that a weight may differ after a step of 1e-2 that follows a resume."""
SOURCES = [f"{world}-{stage}" for world in ("one", "two") for stage in range(4)]
"""Folders of checkpoints after the first step: who wrote them, under which ZeRO stage."""
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(model: str, folder: Path) -> Seen:
    """What both ranks observed (costs a start of two processes, about 30 s)."""
    write_reward_model(model, folder / "reward-model")
    for stage in range(4):
        learner = started(model, zero_stage=stage, schedule="linear")
        changed_by(learner, [random_batch(0)])
        save(learner, folder / f"one-{stage}")
    port = free_port()
    spawn = multiprocessing.get_context("spawn")
    processes = [
        spawn.Process(target=learner_ranks.main, args=(rank, port, model, str(folder)))
        for rank in range(learner_ranks.WORLD)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=250)
    stuck = [process for process in processes if process.is_alive()]
    for process in stuck:
        process.kill()
        process.join()
    assert not stuck
    seen = []
    for rank in range(learner_ranks.WORLD):
        with (folder / f"rank-{rank}.pickle").open("rb") as file:
            seen.append(pickle.load(file))
    failures = [one["traceback"] for one in seen if "traceback" in one]
    assert not failures, "\n".join(failures)
    return seen


@pytest.fixture(scope="module")
def straight(model: str) -> dict[str, np.ndarray]:
    """Weights after both steps, without an interruption, by one rank."""
    learner = started(model, zero_stage=0, schedule="linear")
    for seed in (0, 1):
        changed_by(learner, [random_batch(seed)])
    return read_weights(learner)


@pytest.fixture(scope="module")
def reference(model: str) -> dict[str, np.ndarray]:
    return changed_by(started(model), [random_batch()])


@pytest.mark.parametrize("budget", [4096, 48])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks_make_the_update_of_one(
    ranks: Seen, reference: dict[str, np.ndarray], stage: int, budget: int
) -> None:
    for seen in ranks:
        assert relative_difference(seen[f"change {stage} {budget}"], reference) < TOLERANCE


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_adapters_on_two_ranks_are_those_of_one(ranks: Seen, model: str, stage: int) -> None:
    learner = started(model, lora=LoraConfig(rank=4))
    before, base = read_weights(learner), learner.score(random_batch())
    for step in range(2):
        assert learner.update([random_batch()], step=step) is not None
    after = read_weights(learner)
    alone = {name: after[name] - before[name] for name in before}
    joined = np.zeros_like(base)
    for rank, seen in enumerate(ranks):
        assert relative_difference(seen[f"adapters {stage}"], alone) < TOLERANCE
        share = balanced_shares(random_batch().lengths, learner_ranks.WORLD)[rank]
        joined[ragged_indices(random_batch().action_lengths, share)] = seen[f"reference {stage}"]
    assert np.abs(joined - base).max() < 1e-4


@pytest.fixture(scope="module")
def one_rank(model: str) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    learner = started(model)
    batch = near_policy(learner)
    return {case: gradient(chosen(learner, *case), batch) for case in CASES}


@pytest.mark.parametrize(("loss", "aggregation"), CASES)
def test_gradient_of_every_loss_is_that_of_one_rank(
    ranks: Seen, one_rank: Any, loss: str, aggregation: str
) -> None:
    for seen in ranks:
        found = seen[f"gradient {loss} {aggregation}"]
        assert relative_difference(found, one_rank[loss, aggregation]) < 1e-5


def test_shared_prefixes_on_two_ranks_make_the_update_of_the_plain_path(
    ranks: Seen, model: str
) -> None:
    batch = without_segments(grouped_batch(2))
    plain = {"attention": "sdpa", "shared_prefix": "off"}
    expected = gradient(started(model, **plain), batch)
    changed = changed_by(started(model, **plain), [batch])
    for seen in ranks:
        assert relative_difference(seen["shared gradient"], expected) < 1e-5
        for stage in (0, 3):
            # Adam's first step shows the rounding of the smallest gradients.
            assert relative_difference(seen[f"shared {stage}"], changed) < 2e-4


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_critic_on_two_ranks_is_that_of_one(ranks: Seen, folder: Path, stage: int) -> None:
    alone = critic_change(started_critic(str(folder / "reward-model")), value_batch())
    for seen in ranks:
        assert relative_difference(seen[f"critic {stage}"], alone) < CRITIC_TOLERANCE


@pytest.mark.parametrize("stage", [0, 3])
def test_idle_micro_batches_change_nothing(
    ranks: Seen, reference: dict[str, np.ndarray], stage: int
) -> None:
    for seen in ranks:
        assert relative_difference(seen[f"uneven {stage}"], reference) < TOLERANCE


@pytest.mark.parametrize("stage", [0, 3])
def test_rank_without_rollouts_takes_part(ranks: Seen, stage: int) -> None:
    assert all(seen[f"empty {stage}"] for seen in ranks)


def test_ranks_score_their_own_shares(ranks: Seen, model: str) -> None:
    batch = random_batch()
    learner = started(model)
    changed_by(learner, [batch])
    whole = learner.score(batch)
    for rank, seen in enumerate(ranks):
        sequences = np.arange(1) if rank == 0 else np.arange(1, batch.sequence_count)
        expected = whole[ragged_indices(batch.action_lengths, sequences)]
        np.testing.assert_allclose(seen["uneven score 0"], expected, atol=1e-3)


def test_metrics_of_every_rank_are_those_of_the_whole_batch(ranks: Seen, model: str) -> None:
    result = started(model).update([random_batch()], step=0)
    assert result is not None
    for seen in ranks:
        assert seen["metrics"].keys() == result.metrics.keys()
        for name, value in result.metrics.items():
            assert seen["metrics"][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("stage", range(4))
def test_two_ranks_resume_bit_by_bit(ranks: Seen, stage: int) -> None:
    for seen in ranks:
        straight, resumed = seen[f"straight {stage}"], seen[f"two-{stage} resumed {stage}"]
        assert all((straight[name] == resumed[name]).all() for name in straight)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("source", SOURCES)
def test_two_ranks_resume_what_any_layout_wrote(
    ranks: Seen, straight: dict[str, np.ndarray], folder: Path, source: str, stage: int
) -> None:
    expected = saved_state(folder / source)
    taken = saved_state(folder / f"{source}-by-two-{stage}")
    assert taken.keys() == expected.keys()
    assert all((taken[name] == expected[name]).all() for name in expected)
    for seen in ranks:
        if f"{source} resumed {stage}" in seen:
            assert largest_gap(seen[f"{source} resumed {stage}"], straight) < RESUMED
    if source in (f"two-{stage}", f"one-{(stage + 1) % 4}"):
        assert all(f"{source} resumed {stage}" in seen for seen in ranks)


@pytest.mark.parametrize("stage", range(4))
def test_one_rank_resumes_what_any_layout_wrote(
    ranks: Seen, straight: dict[str, np.ndarray], model: str, folder: Path, stage: int
) -> None:
    """One learner takes up one checkpoint after the other, as when a run is rolled back."""
    learner = started(model, zero_stage=stage, schedule="linear")
    for source in SOURCES:
        learner.load(str(folder / source))
        save(learner, folder / "again")
        expected, taken = saved_state(folder / source), saved_state(folder / "again")
        assert all((taken[name] == expected[name]).all() for name in expected), source
        changed_by(learner, [random_batch(1)])
        assert largest_gap(read_weights(learner), straight) < RESUMED, source


def largest_gap(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in theirs)


@pytest.mark.parametrize("stage", [1, 3])
def test_abort_of_one_rank_is_an_abort_of_all(
    ranks: Seen, reference: dict[str, np.ndarray], stage: int
) -> None:
    for seen in ranks:
        assert seen[f"aborted {stage}"]
        assert relative_difference(seen[f"after abort {stage}"], reference) < TOLERANCE


def test_error_of_one_rank_is_raised_by_all_and_changes_nothing(
    ranks: Seen, reference: dict[str, np.ndarray]
) -> None:
    for seen in ranks:
        assert "ValueError: only here" in seen["error"]
        assert relative_difference(seen["after error"], reference) < TOLERANCE


def test_gathered_weights_are_sent_once_and_whole(ranks: Seen, model: str) -> None:
    from safetensors.torch import load_file

    assert ranks[1]["sent"] == (None, {})
    _, arrived = ranks[0]["sent"]
    original = load_file(Path(model) / "model.safetensors")
    assert arrived.keys() == original.keys()
    assert all((arrived[name] == original[name]).all() for name in original)


def test_export_of_sharded_weights_loads(ranks: Seen, model: str, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    exported: Any = AutoModelForCausalLM.from_pretrained(folder / "export")
    original: Any = AutoModelForCausalLM.from_pretrained(model)
    pairs = zip(exported.parameters(), original.parameters(), strict=True)
    assert all((ours == theirs).all() for ours, theirs in pairs)
