"""NaN and infinity: the step stops and says where they are, or is left out and counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import (
    changed_by,
    random_batch,
    read_weights,
    relative_difference,
    started,
    write_model,
)
from test_value_learner import started as started_critic
from test_value_learner import value_batch
from test_value_learner import weights as critic_weights

from rlx.core.engine.batches import take
from rlx.core.errors import NonFiniteError
from rlx.core.inputs import LossInputs
from rlx.core.references import ComponentRef
from rlx.core.rollouts import TrainBatch

pytestmark = [
    pytest.mark.engine,
    pytest.mark.filterwarnings("ignore:an optimizer step was left out"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


def infinite(x: LossInputs) -> torch.Tensor:
    """Infinite on the second action token, with a gradient of 0 there."""
    surrogate = -x.advantages * x.logprobs
    spot = torch.zeros_like(surrogate)
    spot[1] = torch.inf
    return surrogate + spot


INFINITE = ComponentRef(kind="losses", name="infinite", target=f"{__file__}:infinite")


def named(batch: TrainBatch) -> TrainBatch:
    names = [f"group {i // 2}, rollout {i % 2}, task data/{i // 2}" for i in range(14)]
    return dataclasses.replace(batch, names=np.array(names))


def broken(rollout: int, token: int, value: float) -> TrainBatch:
    """A batch with one advantage that is not finite."""
    batch = named(random_batch())
    assert batch.advantages is not None
    advantages = batch.advantages.copy()
    advantages[int(batch.action_lengths[:rollout].sum()) + token] = value
    return dataclasses.replace(batch, advantages=advantages)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_report_names_group_rollout_task_and_token(model: str, value: float) -> None:
    learner = started(model, token_budget=64)
    with pytest.raises(
        NonFiniteError,
        match=r"the advantage is -?(nan|inf) at action token 2 \(id \d+\) of the rollout "
        r"\(group 4, rollout 1, task data/4\)",
    ) as caught:
        learner.update([broken(9, 2, value)], step=0)
    assert caught.value.token == int(random_batch().action_lengths[:9].sum()) + 2
    assert not caught.value.weights_changed


def test_error_after_the_first_optimizer_step_says_that_weights_changed(model: str) -> None:
    batch = broken(9, 2, np.nan)
    halves = [take(batch, np.arange(0, 7)), take(batch, np.arange(7, 14))]
    with pytest.raises(NonFiniteError) as caught:
        started(model).update(halves, step=0)
    assert caught.value.weights_changed


def test_infinite_loss_with_a_finite_gradient_is_found_too(model: str) -> None:
    learner = started(model, loss=INFINITE)
    with pytest.raises(NonFiniteError, match=r"the loss is inf at action token 1 .* rollout \d"):
        learner.update([random_batch()], step=0)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_skipped_step_leaves_weights_and_optimizer_untouched(model: str, stage: int) -> None:
    settings = {"nonfinite": "skip", "zero_stage": stage, "token_budget": 64}
    learner, healthy = started(model, **settings), started(model, **settings)
    for one in (learner, healthy):
        one.update([random_batch(1)], step=0)
    before = read_weights(learner)
    result = learner.update([broken(9, 2, np.nan)], step=1)
    assert result is not None
    assert result.metrics["policy/skipped_updates"] == 1
    assert "policy/loss" not in result.metrics
    after = read_weights(learner)
    assert all((before[name] == after[name]).all() for name in before)
    # The moments of Adam too: the next step is the one of a learner that never saw the batch.
    ours = changed_by(learner, [random_batch(2)])
    assert relative_difference(ours, changed_by(healthy, [random_batch(2)])) == 0


def test_only_the_minibatch_with_the_number_is_left_out(model: str) -> None:
    batch = broken(9, 2, np.nan)
    halves = [take(batch, np.arange(0, 7)), take(batch, np.arange(7, 14))]
    learner = started(model, nonfinite="skip")
    result = learner.update(halves, step=0)
    assert result is not None
    assert result.metrics["policy/skipped_updates"] == 1
    assert np.isfinite(result.metrics["policy/loss"])
    assert learner._training.updates == 1
    alone = started(model)
    changed_by(alone, [halves[0]])
    ours, theirs = read_weights(learner), read_weights(alone)
    assert all((ours[name] == theirs[name]).all() for name in ours)


def test_healthy_steps_count_no_skips(model: str) -> None:
    skipping = started(model, nonfinite="skip").update([random_batch()], step=0)
    raising = started(model).update([random_batch()], step=0)
    assert skipping is not None
    assert raising is not None
    assert skipping.metrics["policy/skipped_updates"] == 0
    assert "policy/skipped_updates" not in raising.metrics


def test_non_finite_gradient_of_the_weights_is_skipped(model: str) -> None:
    learner = started(model, nonfinite="skip")
    backward = learner._training.model.backward

    def overflow(loss: torch.Tensor, *, last: bool) -> None:
        backward(loss * float("inf"), last=last)

    learner._training.model.backward = overflow  # type: ignore[method-assign]
    before = read_weights(learner)
    result = learner.update([random_batch()], step=0)
    assert result is not None
    assert result.metrics["policy/skipped_updates"] == 1
    after = read_weights(learner)
    assert all((before[name] == after[name]).all() for name in before)


def test_critic_skips_and_counts_on_its_own(model: str) -> None:
    batch = value_batch()
    assert batch.returns is not None
    returns = batch.returns.copy()
    returns[3] = np.nan
    learner = started_critic(model, nonfinite="skip")
    before = critic_weights(learner)
    result = learner.update([dataclasses.replace(batch, returns=returns)], step=0)
    assert result is not None
    assert result.metrics["critic/skipped_updates"] == 1
    after = critic_weights(learner)
    assert all((before[name] == after[name]).all() for name in before)


def extreme(x: LossInputs) -> torch.Tensor:
    assert x.logprobs.dtype == x.advantages.dtype == x.old_logprobs.dtype == torch.float32
    assert x.entropy.dtype == x.ref_logprobs.dtype == torch.float32
    return -x.advantages * x.ratio


def test_components_compute_in_float32_whatever_the_models_dtype(tmp_path: Any) -> None:
    loss = ComponentRef(kind="losses", name="extreme", target=f"{__file__}:extreme")
    folder = write_model(tmp_path / "bf16", dtype="bfloat16")
    learner = started(folder, dtype="auto", loss=loss)
    result = learner.update([random_batch()], step=0)
    assert result is not None
    assert result.logprobs is not None
    assert result.logprobs.dtype == np.float32
    # bfloat16 has three digits: log-probs of that dtype would survive the round trip.
    rounded = torch.from_numpy(result.logprobs).bfloat16().float().numpy()
    assert (rounded != result.logprobs).mean() > 0.9
