"""Which rows are drawn, how pairs are packed, which step was best, when a reference is computed."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlx.core.config import RunConfig
from rlx.core.engine.learner.packing import make_micro_batches, pack
from rlx.core.engine.offline.best import Best
from rlx.core.engine.offline.reference import with_reference
from rlx.core.engine.offline.trainer import DataSet, OfflineTrainer
from rlx.core.errors import UsageError
from rlx.core.offline.draws import Draws, rows_and_steps
from rlx.core.offline.rows import RowBatch, join


def draws(sizes: dict[str, int], *, seed: int = 0, total: int = 100, **more: object) -> Draws:
    settings = {"probabilities": None, "shuffle": True, "batch_size": 8, **more}
    return Draws(sizes, seed=seed, total=total, **settings)  # type: ignore[arg-type]


def made(lengths: list[int], *, per_row: int = 1, source: str = "a") -> RowBatch:
    rng = np.random.default_rng(sum(lengths))
    rows = len(lengths) // per_row
    return RowBatch(
        tokens=rng.integers(3, 60, sum(lengths)).astype(np.int32),
        lengths=np.array(lengths),
        action_lengths=np.ones(len(lengths), np.int64),
        action_positions=np.array(lengths) - 1,
        turn=np.zeros(len(lengths), np.int64),
        number=np.arange(rows),
        source=np.zeros(rows, np.int64),
        sources=(source,),
        per_row=per_row,
        margin=np.arange(rows) / 2 if per_row == 2 else None,
    )


def test_epoch_draws_every_row_once_in_an_order_of_the_seed() -> None:
    first, again, other = (draws({"a": 16}, seed=seed, total=16) for seed in (0, 0, 1))
    rows = np.concatenate([first.next(), first.next()])
    assert sorted(rows) == list(range(16))
    assert rows.tolist() == np.concatenate([again.next(), again.next()]).tolist()
    assert rows.tolist() != np.concatenate([other.next(), other.next()]).tolist()
    assert first.epoch == 1.0


def test_epochs_come_in_different_orders() -> None:
    stream = draws({"a": 8}, total=16)
    assert stream.next().tolist() != stream.next().tolist()


def test_last_batch_takes_what_is_left() -> None:
    stream = draws({"a": 10}, total=10)
    assert [len(stream.next()), len(stream.next())] == [8, 2]


def test_draws_go_on_from_a_saved_position_in_mid_epoch() -> None:
    for probabilities in (None, {"a": 0.75, "b": 0.25}):
        whole, stopped, resumed = (
            draws({"a": 20, "b": 10}, probabilities=probabilities) for _ in range(3)
        )
        expected = [whole.next().tolist() for _ in range(5)]
        for _ in range(2):
            stopped.next()
        resumed.load_state_dict(stopped.state_dict())
        assert [resumed.next().tolist() for _ in range(3)] == expected[2:]


def test_sources_come_in_their_shares() -> None:
    stream = draws({"a": 10, "b": 90}, probabilities={"a": 0.75, "b": 0.25}, batch_size=40)
    rows = stream.next()
    assert Counter((rows >= 10).tolist()) == {False: 30, True: 10}


def test_other_data_can_not_be_gone_on_with() -> None:
    saved = draws({"a": 20}).state_dict()
    with pytest.raises(UsageError, match="20 tasks"):
        draws({"a": 21}).load_state_dict(saved)


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(1.0, None, (100, 13)), (0.5, None, (50, 7)), (3.0, 5, (40, 5))],
)
def test_epochs_or_steps_say_how_much_is_drawn(
    epochs: float, steps: int | None, expected: tuple[int, int]
) -> None:
    assert rows_and_steps([60, 40], epochs=epochs, steps=steps, batch_size=8) == expected


def test_rows_of_joined_sources_keep_their_names() -> None:
    both = join([made([3, 4], source="a"), made([5], source="b")])
    assert [both.name(row) for row in range(3)] == ["row 0 of a", "row 1 of a", "row 0 of b"]
    part = both.take(np.array([2, 0]))
    assert part.name(0) == "row 0 of b"
    assert part.lengths.tolist() == [5, 3]


def test_taken_pairs_stay_whole() -> None:
    batch = made([3, 4, 5, 6, 7, 8], per_row=2).take(np.array([2, 0]))
    assert batch.lengths.tolist() == [7, 8, 3, 4]
    assert batch.margin is not None
    assert batch.margin.tolist() == [1.0, 0.0]
    assert batch.rollout_of.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("packed", [True, False])
def test_pairs_share_a_micro_batch(packed: bool) -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        lengths = rng.integers(2, 60, 40)
        together = np.arange(40) // 2
        blocks = pack(lengths, row_tokens=64, token_budget=128, packed=packed, together=together)
        seen = [index for block in blocks for row in block for index in row]
        assert sorted(seen) == list(range(40))
        for block in blocks:
            inside = Counter(int(together[index]) for row in block for index in row)
            assert set(inside.values()) == {2}
            widest = max(lengths[index] for row in block for index in row)
            width = max(widest, min(64, 2 * widest)) if packed else widest
            assert all(sum(lengths[index] for index in row) <= width for row in block)
            assert len(block) <= max(128 // width, 2)


def test_pair_beyond_the_budget_has_a_micro_batch_of_its_own() -> None:
    batch = made([100, 100, 5, 6], per_row=2)
    blocks = make_micro_batches(batch, row_tokens=64, token_budget=64)
    assert sorted(sorted(block.sequences.tolist()) for block in blocks)[0] == [0, 1]


def test_best_is_the_highest_value_and_the_lowest_loss() -> None:
    for name, values, expected in (("e/accuracy", [1, 3, 3, 2], 1), ("e/loss", [3, 1, 1, 2], 1)):
        best = Best(name)
        for step, value in enumerate(values):
            best.note(step, {name: float(value)})
        assert best.step == expected
        again = Best(name)
        again.load_state_dict(best.state_dict())
        again.note(9, {name: 1.5})
        assert again.step == expected


def test_best_by_a_metric_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(UsageError, match="eval/b/loss") as caught:
        Best("eval/a/loss").note(0, {"eval/b/loss": 1.0})
    assert caught.value.fix is not None


def test_reference_is_computed_once_and_then_read(tmp_path: Path) -> None:
    calls = []

    async def score(rows: RowBatch) -> np.ndarray:
        calls.append(rows.rollout_count)
        return np.arange(rows.action_count, dtype=np.float32)

    def reference(rows: RowBatch, dtype: str = "float32") -> np.ndarray:
        filled = asyncio.run(
            with_reference(
                rows, score, folder=tmp_path, model="m", dtype=dtype, status=lambda text: None
            )
        )
        assert filled.ref_logprobs is not None
        return filled.ref_logprobs

    rows = made([3, 4, 5])
    first, second = reference(rows), reference(rows)
    assert calls == [3]
    assert first.tolist() == second.tolist() == [0.0, 1.0, 2.0]
    reference(rows, "bfloat16")
    reference(dataclasses.replace(rows, tokens=rows.tokens[::-1].copy()))
    assert calls == [3, 3, 3], "another dtype and other tokens have files of their own"
    for path in tmp_path.iterdir():
        path.write_bytes(b"cut off")
    assert reference(rows).tolist() == [0.0, 1.0, 2.0]
    assert len(calls) == 4


@pytest.mark.parametrize("change", ["tokens", "margin"])
def test_checkpoint_of_other_data_is_refused(tmp_path: Path, change: str) -> None:
    """Though as many rows are there as before."""
    import torch

    rows = made([4, 6, 5, 5], per_row=2)
    other = dataclasses.replace(rows, **{change: getattr(rows, change) + 1})
    torch.save({"rows": rows.digest_with_labels, "draws": {}}, tmp_path / "state.pt")
    nothing: Any = None
    trainer = OfflineTrainer(
        run=cast("Any", SimpleNamespace(checkpoints=tmp_path)),
        config=RunConfig(),
        learner=nothing,
        data=DataSet(name="training", rows=other),
        draws=draws({"a": 2}),
        evaluation=[],
        scores=False,
        reporter=cast("Any", SimpleNamespace(status=print)),
        plugins=nothing,
        faults=nothing,
        monitor=nothing,
    )
    with pytest.raises(UsageError, match="made with other rows") as caught:
        asyncio.run(trainer.resume(tmp_path))
    assert "resume with the same data" in (caught.value.fix or "")
