"""The gradient is the same however the batch is split, ordered or repeated, for every loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from invariance_cases import CASES, LOSSES, Weights, chosen, gradient, near_policy, twice
from learner_cases import (
    permuted,
    relative_difference,
    started,
    without_old_logprobs,
    write_model,
)

from rlx.core.engine.learner.learner import PolicyLearner
from rlx.core.engine.learner.packing import make_micro_batches
from rlx.core.errors import ComponentError
from rlx.core.inputs import LossInputs
from rlx.core.ragged import Tensor
from rlx.core.rollouts import TrainBatch

pytestmark = pytest.mark.engine
TOLERANCE = 1e-5
SPLIT = {"token_budget": 64, "row_tokens": 48}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def learner(model: str) -> PolicyLearner:
    return started(model)


@pytest.fixture(scope="module")
def splitting(model: str) -> PolicyLearner:
    return started(model, **SPLIT)


@pytest.fixture(scope="module")
def batch(learner: PolicyLearner) -> TrainBatch:
    return near_policy(learner)


@pytest.fixture(scope="module")
def reference(learner: PolicyLearner, batch: TrainBatch) -> dict[tuple[str, str], Weights]:
    """Each case in one micro-batch."""
    return {case: gradient(chosen(learner, *case), batch) for case in CASES}


@pytest.mark.parametrize(("loss", "aggregation"), CASES)
def test_gradient_does_not_depend_on_micro_batches(
    splitting: PolicyLearner, batch: TrainBatch, reference: Any, loss: str, aggregation: str
) -> None:
    assert len(make_micro_batches(batch, **SPLIT)) >= 4
    split = gradient(chosen(splitting, loss, aggregation), batch)
    assert relative_difference(split, reference[loss, aggregation]) < TOLERANCE


@pytest.mark.parametrize(("loss", "aggregation"), CASES)
def test_gradient_does_not_depend_on_the_order_of_rollouts(
    splitting: PolicyLearner, batch: TrainBatch, reference: Any, loss: str, aggregation: str
) -> None:
    shuffled = gradient(chosen(splitting, loss, aggregation), permuted(batch, 1))
    assert relative_difference(shuffled, reference[loss, aggregation]) < TOLERANCE


@pytest.mark.parametrize(("loss", "aggregation"), CASES)
def test_batch_twice_over_doubled_denominators_is_the_batch(
    splitting: PolicyLearner, batch: TrainBatch, reference: Any, loss: str, aggregation: str
) -> None:
    doubled = gradient(chosen(splitting, loss, aggregation), twice(batch))
    assert relative_difference(doubled, reference[loss, aggregation]) < TOLERANCE


def test_advantages_of_the_step_are_there_without_old_logprobs(
    learner: PolicyLearner, splitting: PolicyLearner, batch: TrainBatch
) -> None:
    """One exactly on-policy update of a loss that scales by what is in the whole step."""
    on_policy = without_old_logprobs(batch)

    def scaled(x: LossInputs) -> Tensor:
        assert x.step_advantages.shape == (batch.action_count,)
        return -x.ratio * x.advantages / x.step_advantages.abs().max()

    found = []
    for one in (learner, splitting):
        chosen(one, "ppo", "token-mean")._loss = scaled  # type: ignore[assignment]
        found.append(gradient(one, on_policy))
    assert relative_difference(*found) < TOLERANCE


def test_old_logprobs_of_the_step_must_be_required(
    learner: PolicyLearner, batch: TrainBatch
) -> None:
    chosen(learner, "ppo", "token-mean")._loss = lambda x: x.step_old_logprobs  # type: ignore[assignment]
    with pytest.raises(ComponentError, match=r'requires=\{"old_logprobs"\}'):
        gradient(learner, without_old_logprobs(batch))


def test_losses_and_aggregations_differ_from_one_another(reference: Any) -> None:
    """Otherwise the tests above would compare one case thirty times."""
    cases = list(reference)
    same = {
        (first, second)
        for index, first in enumerate(cases)
        for second in cases[:index]
        if relative_difference(reference[first], reference[second]) < 10 * TOLERANCE
    }
    assert not same
    assert all(np.isfinite(value).all() for case in cases for value in reference[case].values())


def test_every_builtin_loss_is_tested() -> None:
    import rlx.plugins.losses

    folder = Path(rlx.plugins.losses.__path__[0])
    assert {path.stem for path in folder.glob("[!_]*.py")} == set(LOSSES)
