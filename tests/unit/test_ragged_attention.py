"""Attention of flat rows is that of a dense mask, wherever a stem is laid."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional

from rlx.core.engine.learner.attention import dense_mask
from rlx.core.engine.learner.packing import Layout
from rlx.core.engine.learner.ragged_attention import _RaggedAttention
from rlx.core.engine.learner.ragged_layout import RaggedLayout

CPU = torch.device("cpu")


def layout(trees: list[tuple[int, list[int]]]) -> Layout:
    """Of trees (stem, branches); a stem of 0 tokens is none."""
    spans, stems, end = [], [], 0
    for stem, branches in trees:
        start, first = end, end + stem
        for length in [stem, *branches]:
            if length:
                spans.append((end, end + length))
                end += length
        if stem:
            stems.append((start, first, end))
    return Layout(spans=np.array(spans), stems=np.array(stems, np.int64).reshape(-1, 3))


TREES = {
    "alike": [(5, [7, 7, 7]), (5, [7, 7])],
    "of all lengths": [(3, [9, 1, 4]), (12, [2, 30]), (0, [6]), (3, [8]), (0, [5])],
    "alone": [(0, [4]), (0, [11])],
}


@pytest.mark.parametrize("trees", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("joined", [0, 3, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.02)])
def test_outputs_and_gradients_are_those_of_a_dense_mask(
    trees: list[tuple[int, list[int]]], joined: int, dtype: str, tolerance: float
) -> None:
    flat = layout(trees)
    count = int(flat.spans[:, 1].max())
    torch.manual_seed(0)
    inputs = [torch.randn(count, heads, 8) for heads in (6, 2, 2)]
    upstream = torch.randn(count, 6, 8)
    rounded = [one.to(getattr(torch, dtype)).requires_grad_() for one in inputs]
    ours = _RaggedAttention.apply(*rounded, RaggedLayout.of(flat, CPU, joined=joined), 8**-0.5)
    exact = [one.detach().float().requires_grad_() for one in rounded]
    q, k, v = (one.transpose(0, 1)[None] for one in exact)
    mask = dense_mask(flat, CPU, torch.float32)
    theirs = functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)[0]
    theirs = theirs.transpose(0, 1)
    found = [ours, *torch.autograd.grad(ours, rounded, upstream.to(ours.dtype))]
    wanted = [theirs, *torch.autograd.grad(theirs, exact, upstream)]
    for one, other in zip(found, wanted, strict=True):
        assert (one.float() - other).norm() <= tolerance * other.norm()


def test_stems_stay_apart_from_long_branches() -> None:
    flat = layout([(3, [9, 1, 4]), (2, [4, 5]), (6, [4])])
    found = RaggedLayout.of(flat, CPU, joined=4, shorter=9)
    assert sorted(len(one.keys[0]) for one in found.stems) == [3, 6]
    assert {one.stems.shape[1] for one in found.buckets} == {0, 2}
