"""The critic's learner: values, what an update does and does not depend on, resume, limits."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    learner_arguments,
    permuted,
    random_batch,
    relative_difference,
    save,
    write_model,
)
from learner_cases import started as started_policy

from rlx.core.engine.batches import take
from rlx.core.engine.learner.value_learner import ValueLearner
from rlx.core.errors import EngineError, NonFiniteError
from rlx.core.objective import AGGREGATIONS
from rlx.core.rollouts import TrainBatch
from rlx.core.value_loss import ValueSettings

pytestmark = pytest.mark.engine
TOLERANCE = 5e-4
"""Adam's first step divides each gradient by its own size, so that of a tiny one the rounding."""
PLAIN = ValueSettings(aggregation="token-mean", clip=None, coefficient=1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def reward_model(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_reward_model(model, tmp_path_factory.mktemp("reward-model"))


def write_reward_model(model: str, folder: Path) -> str:
    """A folder as `AutoModelForSequenceClassification` writes it."""
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(1)
    whole: Any = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
    with torch.no_grad():
        whole.score.weight.normal_(std=0.3)
    whole.save_pretrained(folder)
    return str(folder)


def started(model: str, **changes: Any) -> ValueLearner:
    """A started learner; `objective` and fields of its settings may be changed."""
    arguments = learner_arguments(model, **changes)
    for name in ("loss", "correction", "temperature"):
        del arguments[name]
    if "objective" not in changes:
        arguments["objective"] = ValueSettings(aggregation="token-mean")
    learner = ValueLearner(**arguments)
    learner.start()
    return learner


def value_batch(seed: int = 0) -> TrainBatch:
    rng = np.random.default_rng(seed + 100)
    batch = random_batch(seed)
    n = batch.action_count
    return dataclasses.replace(
        batch,
        values=rng.normal(0, 0.1, n).astype(np.float32),
        returns=rng.normal(0.5, 1.0, n).astype(np.float32),
    )


def weights(learner: ValueLearner) -> dict[str, np.ndarray]:
    model = learner._training.model
    found = {name: value.float().numpy().copy() for name, value in model.whole_parameters()}
    import deepspeed

    head = model.module.head.weight
    with deepspeed.zero.GatheredParameters([head], enabled=model.stage == 3):
        return {**found, "head": head.detach().float().numpy().copy()}


def change(learner: ValueLearner, batch: TrainBatch) -> dict[str, np.ndarray]:
    before = weights(learner)
    assert learner.update([batch], step=0) is not None
    after = weights(learner)
    return {name: after[name] - before[name] for name in before}


@pytest.fixture(scope="module")
def reference(reward_model: str) -> dict[str, np.ndarray]:
    return change(started(reward_model), value_batch())


def test_values_start_at_zero(model: str) -> None:
    assert (started(model).score(random_batch()) == 0).all()


def test_values_of_a_reward_model_are_its_scores_where_tokens_are_predicted(
    reward_model: str,
) -> None:
    """Against the model's own head on its own hidden states, one unpacked sequence at a time."""
    from transformers import AutoModelForSequenceClassification

    whole: Any = AutoModelForSequenceClassification.from_pretrained(reward_model)
    batch = random_batch()
    expected = []
    for index in range(batch.sequence_count):
        one = take(batch, np.array([index]))
        tokens = torch.from_numpy(one.tokens).long()[None]
        with torch.no_grad():
            scores = whole.score(whole.base_model(input_ids=tokens).last_hidden_state)[0, :, 0]
        expected.append(scores[torch.from_numpy(one.action_positions) - 1].numpy())
    ours = started(reward_model).score(batch)
    np.testing.assert_allclose(ours, np.concatenate(expected), atol=1e-5)


def test_value_does_not_know_the_token_that_it_precedes(reward_model: str) -> None:
    learner, batch = started(reward_model), random_batch()
    last = int(batch.lengths[0]) - 1
    tokens = batch.tokens.copy()
    tokens[last] = (tokens[last] + 1) % 60
    changed = dataclasses.replace(batch, tokens=tokens)
    np.testing.assert_array_equal(learner.score(changed), learner.score(batch))


def test_head_with_several_outputs_is_refused(model: str, tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    AutoModelForSequenceClassification.from_pretrained(model, num_labels=3).save_pretrained(
        tmp_path
    )
    with pytest.raises(EngineError, match="3 outputs; a value is one number"):
        started(str(tmp_path))


def test_missing_critic_is_an_engine_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="can't be loaded"):
        started(str(tmp_path / "nothing"))


def test_update_equals_one_written_out_in_plain_torch(reward_model: str) -> None:
    from transformers import AutoModelForSequenceClassification

    batch = value_batch()
    assert batch.returns is not None
    plain: Any = AutoModelForSequenceClassification.from_pretrained(reward_model)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0)
    before = {name: value.detach().clone() for name, value in plain.named_parameters()}
    values = []
    for index in range(batch.sequence_count):
        one = take(batch, np.array([index]))
        tokens = torch.from_numpy(one.tokens).long()[None]
        scores = plain.score(plain.base_model(input_ids=tokens).last_hidden_state)[0, :, 0]
        values.append(scores[torch.from_numpy(one.action_positions) - 1])
    error = torch.cat(values) - torch.from_numpy(batch.returns)
    loss = 0.5 * (error**2).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()

    learner = started(reward_model, objective=PLAIN)
    start = weights(learner)
    result = learner.update([batch], step=0)
    assert result is not None
    assert result.metrics["critic/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert result.metrics["critic/grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    assert result.metrics["critic/lr"] == 1e-2
    after = weights(learner)
    changed = {name: after[name] - start[name] for name in after}
    truth = {
        name.removeprefix("model."): (value.detach() - before[name]).numpy()
        for name, value in plain.named_parameters()
    }
    truth["head"] = truth.pop("score.weight")[0]
    assert relative_difference(changed, truth) < TOLERANCE


@pytest.mark.parametrize(
    "settings",
    [
        {"token_budget": 160},
        {"token_budget": 16, "row_tokens": 8},
        {"zero_stage": 1},
        {"zero_stage": 2, "token_budget": 48},
        {"zero_stage": 3, "token_budget": 48},
        {"gradient_checkpointing": True},
    ],
)
def test_update_does_not_depend_on_how_it_is_computed(
    reward_model: str, reference: dict[str, np.ndarray], settings: dict[str, Any]
) -> None:
    changed = change(started(reward_model, **settings), value_batch())
    assert relative_difference(changed, reference) < TOLERANCE


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_aggregations_do_not_depend_on_micro_batches_and_order(
    reward_model: str, aggregation: str
) -> None:
    objective = ValueSettings(aggregation=aggregation, sequence_norm=32)
    whole = change(started(reward_model, objective=objective), value_batch())
    split = started(reward_model, objective=objective, token_budget=64)
    assert relative_difference(change(split, permuted(value_batch(), 3)), whole) < TOLERANCE


def test_values_approach_their_returns(model: str) -> None:
    learner = started(model, lr=3e-3, objective=PLAIN)
    batch = value_batch()
    assert batch.returns is not None
    losses = []
    for step in range(40):
        scored = dataclasses.replace(batch, values=learner.score(batch))
        result = learner.update([scored], step=step)
        assert result is not None
        losses.append(result.metrics["critic/loss"])
    assert losses[-1] < 0.1 * losses[0]


def test_policy_and_critic_train_in_one_process_without_touching_each_other(
    model: str, reward_model: str, reference: dict[str, np.ndarray]
) -> None:
    from learner_cases import changed_by

    alone = changed_by(started_policy(model), [random_batch()])
    policy, critic = started_policy(model), started(reward_model)
    assert relative_difference(changed_by(policy, [random_batch()]), alone) == 0
    assert relative_difference(change(critic, value_batch()), reference) == 0


def test_bfloat16_values_are_float32_numbers(model: str, tmp_path: Path) -> None:
    """A head in bfloat16 would give values with three digits."""
    folder = write_model(tmp_path / "bf16", dtype="bfloat16")
    learner = started(folder, dtype="auto", lr=1e-2)
    assert learner._training.model.stage == 1
    for step in range(3):
        assert learner.update([value_batch()], step=step) is not None
    values = learner.score(random_batch())
    assert values.dtype == np.float32
    assert (torch.from_numpy(values).bfloat16().float().numpy() != values).mean() > 0.9
    result = learner.update([value_batch()], step=3)
    assert result is not None
    assert np.isfinite(result.metrics["critic/loss"])


RESUME = """
import sys
sys.path.insert(0, {here!r})
import numpy as np
from test_value_learner import started, value_batch, weights
learner = started({model!r}, **{settings!r})
learner.load({folder!r})
for step in (2, 3):
    result = learner.update([value_batch(step)], step=step)
np.savez({out!r}, loss=result.metrics["critic/loss"], **weights(learner))
"""


@pytest.mark.parametrize("stage", [0, 2])
def test_new_process_resumes_bit_by_bit(reward_model: str, tmp_path: Path, stage: int) -> None:
    settings = {"zero_stage": stage, "schedule": "cosine", "warmup_steps": 1}
    learner = started(reward_model, **settings)
    for step in (0, 1):
        learner.update([value_batch(step)], step=step)
    save(learner, str(tmp_path / "critic"))
    for step in (2, 3):
        result = learner.update([value_batch(step)], step=step)
    assert result is not None
    code = RESUME.format(
        here=str(Path(__file__).parent),
        model=reward_model,
        settings=settings,
        folder=str(tmp_path / "critic"),
        out=str(tmp_path / "resumed.npz"),
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
    resumed = np.load(tmp_path / "resumed.npz")
    assert float(resumed["loss"]) == result.metrics["critic/loss"]
    straight = weights(learner)
    assert all((resumed[name] == straight[name]).all() for name in straight)


def test_aborted_update_leaves_no_trace(
    reward_model: str, reference: dict[str, np.ndarray]
) -> None:
    learner = started(reward_model, token_budget=48)
    learner.abort()
    before = weights(learner)
    assert learner.update([value_batch()], step=0) is None
    after = weights(learner)
    assert all((before[name] == after[name]).all() for name in before)
    assert relative_difference(change(learner, value_batch()), reference) < TOLERANCE


def test_return_that_is_not_finite_is_found_by_rollout_and_token(reward_model: str) -> None:
    batch = value_batch()
    assert batch.returns is not None
    returns = batch.returns.copy()
    returns[int(batch.action_lengths[:6].sum()) + 4] = np.inf
    names = np.array([f"group {i // 2}, rollout {i % 2}, task data/{i // 2}" for i in range(14)])
    broken = dataclasses.replace(batch, returns=returns, names=names)
    with pytest.raises(
        NonFiniteError,
        match=r"the return is inf at action token 4 .*\(group 3, rollout 0, task data/3\)",
    ):
        started(reward_model).update([broken], step=0)
