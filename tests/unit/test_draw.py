"""Tokens are drawn by inversion of the distribution, whatever the size of the vocabulary."""

from __future__ import annotations

import pytest
import torch

from rlx.core.engine.rollout.sampling import draw


@pytest.mark.parametrize("vocabulary", [1, 7, 256, 257, 1000])
def test_the_token_is_the_one_at_which_the_share_is_reached(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logprobs = (3 * torch.randn(500, vocabulary, generator=generator)).log_softmax(-1)
    uniforms = torch.rand(500, dtype=torch.float64, generator=generator)
    cumulated = logprobs.exp().double().cumsum(-1)
    target = (uniforms * cumulated[:, -1])[:, None]
    plain = torch.searchsorted(cumulated, target, right=True)[:, 0]
    assert torch.equal(draw(logprobs, uniforms), plain)


def test_excluded_tokens_are_never_drawn_not_even_at_the_ends() -> None:
    probabilities = torch.zeros(600)
    probabilities[[3, 255, 300, 511]] = 0.25
    ends = torch.tensor([0.0, 0.25, 0.5, 0.75, 1 - 2**-53], dtype=torch.float64)
    uniforms = torch.cat([ends, torch.linspace(0, 1, 1000, dtype=torch.float64)[:-1]])
    drawn = draw(probabilities.log().expand(len(uniforms), -1), uniforms)
    assert set(drawn.tolist()) == {3, 255, 300, 511}
    assert drawn[0] == 3
    assert drawn[4] == 511


def test_tokens_come_as_often_as_they_are_likely() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(400, generator=generator) ** 4
    probabilities /= probabilities.sum()
    count = 100_000
    uniforms = torch.rand(count, dtype=torch.float64, generator=generator)
    drawn = draw(probabilities.log().expand(count, -1), uniforms)
    found = torch.bincount(drawn, minlength=400).double()
    wanted = count * probabilities.double()
    often = wanted > 5
    chi_square = ((found - wanted) ** 2 / wanted)[often].sum() / (often.sum() - 1)
    assert 0.7 < chi_square < 1.3
