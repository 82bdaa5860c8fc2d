"""Every correction against plain Python loops, and on log-probs that an engine got wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.core.errors import UsageError
from rlx.plugins.corrections.icepop import icepop
from rlx.plugins.corrections.none import none
from rlx.plugins.corrections.seq_mask_tis import seq_mask_tis
from rlx.plugins.corrections.seq_tis import seq_tis
from rlx.plugins.corrections.tis import tis
from rlx.testing.inputs import correction_inputs

Sequences = list[list[tuple[float, float]]]  # (old, rollout) per token, per rollout

logprob = st.floats(-6, 0)
sequences = st.lists(st.lists(st.tuples(logprob, logprob), max_size=5), min_size=1, max_size=4)


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ref_none(seq: list[tuple[float, float]], low: float, high: float) -> list[float]:
    return [1.0 for _ in seq]


def ref_tis(seq: list[tuple[float, float]], low: float, high: float) -> list[float]:
    return [clip(math.exp(o - r), low, high) for o, r in seq]


def ref_icepop(seq: list[tuple[float, float]], low: float, high: float) -> list[float]:
    ratios = [math.exp(o - r) for o, r in seq]
    return [w if low <= w <= high else 0.0 for w in ratios]


def ref_seq_tis(seq: list[tuple[float, float]], low: float, high: float) -> list[float]:
    product = math.exp(clip(sum(o - r for o, r in seq), -20, 20))
    return [clip(product, low, high) for _ in seq]


def ref_seq_mask_tis(seq: list[tuple[float, float]], low: float, high: float) -> list[float]:
    if not seq:
        return []
    geometric = math.exp(sum(o - r for o, r in seq) / len(seq))
    return ref_tis(seq, low, high) if low <= geometric <= high else [0.0] * len(seq)


CASES = [
    (tis, ref_tis),
    (icepop, ref_icepop),
    (seq_tis, ref_seq_tis),
    (seq_mask_tis, ref_seq_mask_tis),
]
CORRECTIONS = [none, tis, icepop, seq_tis, seq_mask_tis]


def inputs_of(rollouts: Sequences) -> Any:
    flat = [pair for seq in rollouts for pair in seq]
    return correction_inputs(
        old_logprobs=[old for old, _ in flat],
        rollout_logprobs=[rollout for _, rollout in flat],
        lengths=[len(seq) for seq in rollouts],
    )


@pytest.mark.parametrize(("low", "high"), [(0.5, 2.0), (0.99, 1.001), (0.0, 1.0)])
@pytest.mark.parametrize(("correction", "reference"), CASES, ids=[c.__name__ for c, _ in CASES])
def test_correction_equals_its_reference(
    correction: Any, reference: Any, low: float, high: float
) -> None:
    @settings(max_examples=30)
    @given(sequences)
    def check(rollouts: Sequences) -> None:
        found = correction(inputs_of(rollouts), low=low, high=high)
        expected = [w for seq in rollouts for w in reference(seq, low, high)]
        assert found.dtype == torch.float64
        assert found.tolist() == pytest.approx(expected, abs=1e-9, rel=1e-9)

    check()


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_agreement_has_weight_one(correction: Any) -> None:
    x = correction_inputs(old_logprobs=[-1.0, -2.0, -0.5], rollout_logprobs=[-1.0, -2.0, -0.5])
    assert correction(x).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("bad", [-math.inf, math.nan, -1e4, 0.0])
def test_wrong_engine_logprobs_give_finite_weights(correction: Any, bad: float) -> None:
    x = correction_inputs(
        old_logprobs=[-1.0, -1.0, -1.0], rollout_logprobs=[-1.0, bad, -1.0], lengths=[2, 1]
    )
    weights = correction(x)
    assert weights.isfinite().all()
    assert weights[2].item() == 1.0


def test_token_that_the_engine_gave_no_probability_is_masked_by_icepop() -> None:
    x = correction_inputs(
        old_logprobs=[-1.0, -1.0, -1.0], rollout_logprobs=[-math.inf, math.nan, -1.0]
    )
    assert icepop(x).tolist() == [0.0, 0.0, 1.0]
    assert tis(x, high=3.0).tolist() == [3.0, 3.0, 1.0]


def test_weights_carry_no_gradient() -> None:
    old = torch.tensor([-1.0, -2.0], requires_grad=True)
    for correction in CORRECTIONS:
        x = correction_inputs(old_logprobs=old, rollout_logprobs=torch.tensor([-1.5, -1.5]))
        assert not correction(x).requires_grad


@pytest.mark.parametrize("name", ["tis", "icepop", "seq_tis", "seq_mask_tis"])
def test_a_band_upside_down_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match=r"low \(5\) is larger than high \(0\.5\)"):
        rlx.resolve("corrections", name, low=5.0, high=0.5)
    rlx.resolve("corrections", name, low=0.5, high=0.5)
