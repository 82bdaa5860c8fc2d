"""Arithmetic of batches and bytes, against numbers worked out by hand or measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rlx.core import sizes
from rlx.core.config import RunConfig
from rlx.core.models import ModelInfo

INFO = ModelInfo(
    name="m",
    folder=None,
    architecture="LlamaForCausalLM",
    vocab_size=16384,
    context_length=256,
    dtype="float32",
    tied=True,
    hidden_size=512,
    layers=6,
    kv_width=256,
    parameters=26_090_000,
    exact=True,
)


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate(changes)


@pytest.mark.parametrize(("budget", "measured"), [(512, 1.12), (4096, 2.25)])
def test_the_learner_s_memory_is_near_what_was_measured(budget: int, measured: float) -> None:
    settings = config(learner={"token_budget": budget})
    assert INFO.parameters is not None
    total = sizes.training_bytes(settings, INFO, INFO.parameters)
    total += sizes.activation_bytes(settings, INFO) + 450 * 2**20
    assert total / 2**30 == pytest.approx(measured, rel=0.12)


def test_checkpointing_and_chunks_save_memory() -> None:
    plain = sizes.activation_bytes(config(learner={"token_budget": 4096}), INFO)
    light = config(
        learner={"token_budget": 4096, "gradient_checkpointing": True, "logprob_chunk": 256}
    )
    assert sizes.activation_bytes(light, INFO) < plain / 4


@pytest.mark.parametrize(
    ("learner", "budget", "micro_batches"),
    [
        ({}, 4096, 8),  # 128 rollouts of 256 tokens, 16 in a micro-batch of 4096
        ({"minibatch_size": 32}, 4096, 2),
        ({"ranks": 4}, 4096, 2),
        ({}, 16, 128),  # a longer sequence is a micro-batch of its own
    ],
)
def test_micro_batches_follow_from_the_token_budget(
    learner: dict[str, Any], budget: int, micro_batches: int
) -> None:
    found = sizes.batch_sizes(config(learner=learner), 256, token_budget=budget)
    assert found.micro_batches == micro_batches


SMOLLM2 = replace(INFO, vocab_size=49152, hidden_size=576, layers=30, dtype="bfloat16")


def test_a_micro_batch_on_a_cpu_keeps_about_a_gibibyte() -> None:
    found = sizes.token_budget(config(), SMOLLM2, accelerated=False)
    # (30 layers x 25 values of the width 576 + 49152 logits) x 2 bytes = 962,304 for each token
    assert found == 2**30 // 962_304 == 1115
    settings = config(learner={"token_budget": found})
    assert sizes.activation_bytes(settings, SMOLLM2) == pytest.approx(2**30, rel=1e-3)


def test_a_micro_batch_of_a_small_model_or_on_a_gpu_has_4096_tokens() -> None:
    assert sizes.token_budget(config(), SMOLLM2, accelerated=True) == 4096
    small = replace(INFO, vocab_size=259, hidden_size=96, layers=3)
    assert sizes.token_budget(config(), small, accelerated=False) == 4096


def test_a_micro_batch_of_a_large_model_on_a_cpu_is_not_tiny() -> None:
    large = replace(SMOLLM2, hidden_size=4096, layers=32)
    assert sizes.token_budget(config(), large, accelerated=False) == 512


def test_a_token_budget_that_was_set_stands() -> None:
    settings = config(learner={"token_budget": 3000})
    assert sizes.token_budget(settings, SMOLLM2, accelerated=False) == 3000


@pytest.mark.parametrize(
    ("data", "rollout", "longest"),
    [
        ({}, {}, 1000),
        ({}, {"context_length": 500}, 500),
        ({"max_prompt_tokens": 100}, {"max_new_tokens": 50}, 150),
        ({"max_prompt_tokens": 990}, {"max_new_tokens": 50}, 1000),
    ],
)
def test_the_longest_sequence(data: dict[str, Any], rollout: dict[str, Any], longest: int) -> None:
    assert sizes.longest_sequence(config(data=data, rollout=rollout), 1000) == longest


@pytest.mark.parametrize(
    ("learner", "expected"),
    [
        ({}, 0),
        ({"dtype": "bfloat16"}, 1),
        ({"ranks": 2}, 1),
        ({"zero_stage": 3, "ranks": 2}, 3),
    ],
)
def test_the_zero_stage_that_is_taken_by_itself(learner: dict[str, Any], expected: int) -> None:
    assert sizes.zero_stage(config(learner=learner), INFO) == expected


def test_bytes_of_training_one_parameter() -> None:
    for learner, expected in (
        ({}, 16),  # weight 4, gradient 4, moments 8
        ({"dtype": "bfloat16"}, 16),  # 2, 2, 8 and a master copy 4
        ({"ranks": 4, "zero_stage": 1}, 4 + 4 + 2),
        ({"ranks": 4, "zero_stage": 2}, 4 + 1 + 2),
        ({"ranks": 4, "zero_stage": 3}, 1 + 1 + 2),
    ):
        assert sizes.training_bytes(config(learner=learner), INFO, 1000) == expected * 1000


def test_keys_and_values_of_a_token() -> None:
    assert sizes.kv_bytes_per_token(INFO, "bfloat16") == 2 * 6 * 256 * 2


def test_the_kv_cache_holds_all_rollouts_of_a_step_and_at_least_one_whole_context() -> None:
    def gib(rollout: dict[str, Any], *, tokens: int | None, context: int) -> float | None:
        shape = {"groups": 8, "group_size": 8, **rollout}
        return sizes.kv_gib_of_a_step(
            config(rollout=shape),
            INFO,
            dtype="bfloat16",
            sequence_tokens=tokens,
            context_length=context,
        )

    token = sizes.kv_bytes_per_token(INFO, "bfloat16")
    assert token is not None
    few, one_context = gib({}, tokens=40, context=64), gib({}, tokens=40, context=8192)
    assert few is not None
    assert one_context is not None
    assert few * sizes.GIB >= 64 * 64 * token  # two blocks for each of 64 sequences
    assert few < 2 * 64 * 64 * token / sizes.GIB
    assert one_context * sizes.GIB >= 8192 * token
    assert gib({"max_running": 4}, tokens=40, context=64) < few  # type: ignore[operator]
    assert gib({}, tokens=None, context=64) is None
    assert gib({"max_staleness": 1}, tokens=40, context=64) is None
