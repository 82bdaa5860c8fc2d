"""Sharing prefixes changes what is computed, and neither log-probs nor entropies nor gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invariance_cases import gradient
from learner_cases import relative_difference, started, write_model
from prefix_cases import (
    PLAIN,
    TOLERANCE,
    assert_same,
    grouped_batch,
    passes,
    without_segments,
    write_architecture,
)

from rlx.core.config import LearnerConfig
from rlx.core.engine.learner.packing import read_lengths
from rlx.core.engine.learner.scorer import Scorer
from rlx.core.errors import UsageError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, str]:
    return {name: write_architecture(folder, name) for name in ("llama", "qwen2", "gpt2", "gemma2")}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"token_budget": 64},
        {"token_budget": 48, "gradient_checkpointing": True, "logprob_chunk": 16},
    ],
)
def test_shared_prefixes_change_nothing_but_the_number_of_tokens(
    models: dict[str, str], name: str, seed: int, settings: dict[str, Any]
) -> None:
    batch = grouped_batch(seed)
    plain, _ = passes(models[name], batch, **PLAIN)
    shared, tokens = passes(models[name], batch, shared_prefix="on", **settings)
    assert_same(shared, plain)
    assert tokens < batch.lengths.sum()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_dense_mask_does_the_same_under_other_attention(
    models: dict[str, str], attention: str
) -> None:
    batch = grouped_batch(7)
    plain, _ = passes(models["llama"], batch, **PLAIN)
    shared, tokens = passes(models["llama"], batch, attention=attention, shared_prefix="on")
    assert_same(shared, plain)
    assert tokens < batch.lengths.sum()


@pytest.mark.parametrize("shared_prefix", ["off", "auto"])
def test_ragged_attention_has_no_pads(models: dict[str, str], shared_prefix: str) -> None:
    batch = grouped_batch(8)
    plain, _ = passes(models["qwen2"], batch, **PLAIN)
    ragged, tokens = passes(models["qwen2"], batch, shared_prefix=shared_prefix)
    assert_same(ragged, plain)
    read = int(read_lengths(batch).sum())
    assert (tokens == read) == (shared_prefix == "off")


def test_windowed_attention_keeps_to_the_plain_path(models: dict[str, str]) -> None:
    batch = grouped_batch(9)
    plain, _ = passes(models["gemma2"], batch, **{**PLAIN, "attention": "eager"})
    found, _ = passes(models["gemma2"], batch)
    assert_same(found, plain)
    for settings in ({"attention": "ragged"}, {"shared_prefix": "on"}):
        with pytest.raises(UsageError, match="Gemma2Model"):
            passes(models["gemma2"], batch, **settings)  # type: ignore[arg-type]


def test_flash_attention_that_is_not_installed_is_named(models: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="flash_attn"):
        passes(models["llama"], grouped_batch(0), attention="flash_attention_2")


def test_a_reference_model_shares_prefixes_too(models: dict[str, str]) -> None:
    batch = grouped_batch(3)
    found = []
    for changes in (PLAIN, {"shared_prefix": "on"}):
        settings = LearnerConfig.model_validate({"dtype": "float32", **changes})
        scorer = Scorer(model=models["llama"], settings=settings, temperature=0.8, threads=1)
        assert scorer.start()["shared_prefix"] == (changes is not PLAIN)
        found.append(scorer.score(batch))
    np.testing.assert_allclose(found[1], found[0], rtol=TOLERANCE, atol=1e-5)


def test_bfloat16_shares_within_its_rounding(models: dict[str, str]) -> None:
    batch = grouped_batch(5)
    exact, _ = passes(models["llama"], batch, **PLAIN)
    gaps = []
    for changes in (PLAIN, {"shared_prefix": "on"}):
        found, _ = passes(models["llama"], batch, dtype="bfloat16", **changes)
        gaps.append(float(np.abs(found["logprobs"] - exact["logprobs"]).mean()))
    assert gaps[1] < 1.3 * gaps[0] < 0.2


@pytest.mark.engine
def test_the_loss_has_the_same_gradient_with_shared_prefixes(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    batch = without_segments(grouped_batch(2))
    plain = gradient(started(model, **PLAIN), batch)
    shared = gradient(started(model, shared_prefix="on", token_budget=96), batch)
    assert relative_difference(shared, plain) < TOLERANCE
