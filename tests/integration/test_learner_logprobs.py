"""Packed, chunked log-probs are those of the plain model, one sequence at a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import learner_arguments, random_batch, write_model

import rlx.embedded
from rlx.core.engine.batches import ragged_indices, take
from rlx.core.engine.learner.model import PackedPolicy, examine
from rlx.core.engine.learner.scorer import Scorer
from rlx.core.engine.learner.token_logprobs import token_logprobs
from rlx.core.errors import EngineError, UsageError
from rlx.core.rollouts import TrainBatch

TEMPERATURE = 0.8


def scorer(model: str, **changes: Any) -> Scorer:
    settings = learner_arguments(model, **changes)["settings"]
    worker = Scorer(model=model, settings=settings, temperature=TEMPERATURE, threads=1)
    worker.start()
    return worker


def one_by_one(model: Any, batch: TrainBatch) -> np.ndarray:
    """Log-probs [N] by the model's own forward pass, one unpacked sequence at a time."""
    parts = []
    for index in range(batch.sequence_count):
        single = take(batch, np.array([index]))
        tokens = torch.from_numpy(single.tokens).long()
        with torch.no_grad():
            logits = model(input_ids=tokens[None]).logits[0].float() / TEMPERATURE
        at = torch.from_numpy(single.action_positions)
        parts.append(logits.log_softmax(-1)[at - 1, tokens[at]].numpy())
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(model: str) -> np.ndarray:
    from transformers import AutoModelForCausalLM

    return one_by_one(AutoModelForCausalLM.from_pretrained(model), random_batch())


@pytest.mark.parametrize("row_tokens", [8, 64, 512])
@pytest.mark.parametrize("token_budget", [16, 128, 4096])
def test_packed_logprobs_equal_unpacked_ones(
    model: str, truth: np.ndarray, row_tokens: int, token_budget: int
) -> None:
    worker = scorer(model, row_tokens=row_tokens, token_budget=token_budget)
    np.testing.assert_allclose(worker.score(random_batch()), truth, atol=1e-5)


def test_embedded_model_packs() -> None:
    from transformers import AutoModelForCausalLM

    folder = str(Path(rlx.embedded.__file__).parent / "model")
    batch = random_batch()
    batch = dataclasses.replace(batch, tokens=batch.tokens % 16)
    worker = scorer(folder, dtype="auto")
    assert worker.start()["packed"] is True
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    np.testing.assert_allclose(worker.score(batch), one_by_one(loaded, batch), atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunked_logprobs_equal_unchunked_ones(model: str, truth: np.ndarray, chunk: int) -> None:
    np.testing.assert_allclose(
        scorer(model, logprob_chunk=chunk).score(random_batch()), truth, atol=1e-5
    )


def test_logprobs_come_back_in_the_order_of_the_batch(model: str, truth: np.ndarray) -> None:
    batch = random_batch()
    order = np.random.default_rng(3).permutation(batch.sequence_count)
    shuffled = scorer(model).score(take(batch, order))
    moved = truth[ragged_indices(batch.action_lengths, order)]
    np.testing.assert_allclose(shuffled, moved, atol=1e-5)


def test_rollouts_without_action_tokens_are_passed_over(model: str, truth: np.ndarray) -> None:
    batch = random_batch()
    prompt_only = take(batch, np.array([0]))
    nothing = np.zeros(0, np.int64)
    joined = TrainBatch(
        **{
            name: np.concatenate(
                [
                    {"action_lengths": np.array([0])}.get(
                        name,
                        getattr(prompt_only, name)
                        if name in ("tokens", "lengths", "group", "rewards")
                        else nothing.astype(getattr(batch, name).dtype),
                    ),
                    getattr(batch, name),
                ]
            )
            for name in batch.__dataclass_fields__
            if getattr(batch, name) is not None
        }
    )
    assert joined.sequence_count == batch.sequence_count + 1
    np.testing.assert_allclose(scorer(model).score(joined), truth, atol=1e-5)


def test_empty_batch_scores_to_nothing(model: str) -> None:
    empty = take(random_batch(), np.zeros(0, np.int64))
    assert scorer(model).score(empty).shape == (0,)


def test_bfloat16_logprobs_stay_near_float32_ones(model: str, truth: np.ndarray) -> None:
    ours = scorer(model, dtype="bfloat16").score(random_batch())
    assert 0 < np.abs(ours - truth).mean() < 0.1


def head_and_states(seed: int = 0) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    head = torch.nn.Linear(16, 40, bias=False, dtype=torch.float32)
    return head, torch.randn(23, 16, requires_grad=True), torch.randint(0, 40, (23,))


def test_entropy_is_that_of_the_tempered_distribution() -> None:
    head, hidden, targets = head_and_states()
    logprobs, entropy = token_logprobs(
        head, hidden, targets, temperature=0.5, chunks=1, entropy_gradient=True
    )
    expected = torch.distributions.Categorical(logits=head(hidden) / 0.5)
    torch.testing.assert_close(entropy, expected.entropy())
    torch.testing.assert_close(logprobs, expected.log_prob(targets))


def test_entropy_of_impossible_tokens_is_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -1e30]])
    _, entropy = token_logprobs(
        lambda states: states,
        logits,
        torch.tensor([0]),
        temperature=1.0,
        chunks=1,
        entropy_gradient=False,
    )
    assert entropy.isfinite().all()


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("chunks", [2, 5, 30])
def test_chunks_have_the_gradient_of_the_whole(chunks: int, entropy_gradient: bool) -> None:
    def gradients(pieces: int) -> list[torch.Tensor]:
        head, hidden, targets = head_and_states()
        logprobs, entropy = token_logprobs(
            head,
            hidden,
            targets,
            temperature=0.7,
            chunks=pieces,
            entropy_gradient=entropy_gradient,
        )
        assert entropy.requires_grad == entropy_gradient
        weights = torch.linspace(-1, 1, len(targets))
        (logprobs @ weights + (entropy**2).sum()).backward()
        assert hidden.grad is not None
        assert head.weight.grad is not None
        return [hidden.grad, head.weight.grad]

    for ours, whole in zip(gradients(chunks), gradients(1), strict=True):
        torch.testing.assert_close(ours, whole)


def test_soft_capped_logits_are_known(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

    torch.manual_seed(0)
    config = Gemma2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=64,
        final_logit_softcapping=3.0,
        attn_logit_softcapping=0.5,
        sliding_window=8,
        initializer_range=0.3,
    )
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    # sdpa would leave the cap on the scores out.
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    batch = random_batch()
    np.testing.assert_allclose(
        scorer(str(tmp_path)).score(batch), one_by_one(loaded, batch), atol=1e-5
    )
    with pytest.raises(UsageError, match="caps the scores"):
        scorer(str(tmp_path), attention="sdpa").score(batch)


def test_model_that_leaks_between_packed_sequences_gets_one_sequence_per_row(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    config = Lfm2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
        layer_types=["conv", "full_attention"],
        initializer_range=0.3,
    )
    Lfm2ForCausalLM(config).save_pretrained(tmp_path)
    worker = scorer(str(tmp_path))
    assert worker.start()["packed"] is False
    batch = random_batch()
    truth = one_by_one(AutoModelForCausalLM.from_pretrained(tmp_path), batch)
    np.testing.assert_allclose(worker.score(batch), truth, atol=1e-5)


def test_unknown_change_of_the_logits_is_refused(model: str) -> None:
    from transformers import AutoModelForCausalLM

    loaded: Any = AutoModelForCausalLM.from_pretrained(model)
    plain = loaded.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    loaded.forward = forward
    with pytest.raises(EngineError, match="changes its logits"):
        examine(PackedPolicy(loaded, 1.0), torch.device("cpu"))


def test_missing_model_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="can't be loaded"):
        scorer(str(tmp_path / "nothing"))
