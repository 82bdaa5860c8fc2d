"""Whoever changes in place what it was given is told so, or writes to a copy."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import rlx
from rlx.core.advantages import estimate
from rlx.core.config import RunConfig
from rlx.core.detached import detached
from rlx.core.engine.batches import make_batch
from rlx.core.engine.reporting import Reporter
from rlx.core.engine.views import shown_batch, shown_groups
from rlx.core.errors import ComponentError
from rlx.core.hooks import Hooks
from rlx.core.objective import Denominators, ObjectiveSettings, policy_objective
from rlx.core.plugins import PluginSystem
from rlx.core.rollouts import Group, Rollout, Span, Task
from rlx.core.run import Run
from rlx.testing import estimator_inputs, loss_inputs


def centres_in_place(x):
    x.rewards.sub_(x.rewards.mean())
    return x.rewards


def changes_a_part(x):
    x.parts["style"].zero_()
    return x.rewards


def writes_through_an_index(x):
    x.lengths[0] = 5
    return x.rewards


@pytest.mark.parametrize(
    ("estimator", "name"),
    [
        (centres_in_place, "x.rewards"),
        (changes_a_part, r"x.parts\['style'\]"),
        (writes_through_an_index, "x.lengths"),
    ],
)
def test_estimator_that_changes_its_inputs_is_stopped(estimator, name: str) -> None:
    x = estimator_inputs(rewards=[0.0, 1.0], parts={"style": torch.ones(2)})
    with pytest.raises(ComponentError, match=f"estimator '{estimator.__name__}' changed its input"):
        estimate(estimator, x)
    with pytest.raises(ComponentError, match=name):
        estimate(estimator, estimator_inputs(rewards=[0.0, 1.0], parts={"style": torch.ones(2)}))


def test_estimator_that_works_on_copies_is_left_alone() -> None:
    def copies(x):
        return x.rewards.clone().sub_(1.0)

    x = estimator_inputs(rewards=[0.0, 1.0])
    assert estimate(copies, x).advantages.tolist() == [-1.0, 0.0]


def objective(loss, correction=None):
    x = loss_inputs(
        logprobs=[-1.0, -2.0],
        old_logprobs=[-1.0, -2.0],
        rollout_logprobs=[-1.0, -2.0],
        advantages=[1.0, -1.0],
    )
    return policy_objective(
        x,
        loss=loss,
        correction=correction,
        settings=ObjectiveSettings(aggregation="token-mean"),
        denominators=Denominators(tokens=2, sequences=1),
    )


def test_loss_and_correction_that_change_their_inputs_are_stopped() -> None:
    def loss(x):
        return -x.ratio * x.advantages.clamp_(min=0)

    def correction(c):
        return c.rollout_logprobs.exp_()

    with pytest.raises(ComponentError, match=r"loss 'loss' changed its input x\.advantages"):
        objective(loss)
    with pytest.raises(ComponentError, match=r"correction 'correction' .* x\.rollout_logprobs"):
        objective(lambda x: -x.ratio * x.advantages, correction)


def test_exception_of_a_loss_is_said_to_be_the_losss() -> None:
    def mine(x):
        return x.logprobs.sum() / [0][1]

    with pytest.raises(ComponentError, match=r"The loss 'mine' raised IndexError: list") as caught:
        objective(mine)
    assert isinstance(caught.value.__cause__, IndexError)


def a_group() -> Group:
    task = Task(id="t/0", prompt="p", tokens=(1, 2), label="x", columns={"level": 1})
    rollout = Rollout(
        task=task,
        group_id=0,
        index=0,
        tokens=np.array([1, 2, 3], np.int32),
        spans=(Span(start=2, stop=3, version=0, finish_reason="stop"),),
        logprobs=np.array([-1.0], np.float32),
        text="x",
        finish_reason="stop",
        parts={"math": 1.0},
        metrics={},
    )
    return Group(id=0, task=task, rollouts=[rollout])


def test_what_observers_do_to_groups_and_batch_does_not_reach_training() -> None:
    group = a_group()
    (shown,) = shown_groups([group])
    with pytest.raises(ValueError, match="read-only"):
        shown.rollouts[0].tokens[0] = 9
    shown.rollouts[0].parts["math"] = 0.0
    shown.task.columns["level"] = 2
    assert group.rollouts[0].parts == {"math": 1.0}
    assert group.task.columns == {"level": 1}
    batch = make_batch([group])
    with pytest.raises(ValueError, match="read-only"):
        shown_batch(batch).rewards += 1
    batch.rewards[0] = 2.0  # the run's own arrays stay as they are


def test_each_observer_gets_a_dict_of_its_own() -> None:
    class Vandal:
        @rlx.hookimpl
        def rlx_on_step_end(self, metrics):
            metrics.clear()

    seen = []

    class Reader:
        @rlx.hookimpl(trylast=True)
        def rlx_on_step_end(self, metrics):
            seen.append(dict(metrics))

    hooks = Hooks()
    hooks.register(Reader(), "reader")
    hooks.register(Vandal(), "vandal")
    metrics = {"reward/mean": 1.0}
    hooks.notify("rlx_on_step_end", run=None, step=1, metrics=metrics)
    assert seen == [metrics] == [{"reward/mean": 1.0}]


class Meddler:
    """Writes to everything that it is shown."""

    @rlx.hookimpl
    def rlx_configure(self, config):
        config.learner.lr = 0.5
        config.rewards.clear()
        config.estimator.params.update(eps=5.0)

    @rlx.hookimpl
    def rlx_on_run_start(self, run):
        run.config.learner.lr = 0.5
        run.config.rewards.clear()

    @rlx.hookimpl
    def rlx_on_rollouts(self, groups):
        groups.clear()

    @rlx.hookimpl
    def rlx_on_checkpoint(self, step):
        raise SystemExit(3)


def test_configuration_that_a_hook_writes_to_stays_as_it_is_and_the_plugin_is_named(
    caplog, tmp_path: Path
) -> None:
    hooks = Hooks()
    hooks.register(Meddler(), "meddler")
    config, before = RunConfig(), RunConfig().model_dump()
    hooks.control("rlx_configure", config=config)
    assert config.model_dump() == before
    assert "rlx_configure of plugin meddler changed the configuration" in caplog.text
    run = Run(name="r", folder=tmp_path, config=config)
    hooks.notify("rlx_on_run_start", run=run)
    groups = [a_group()]
    hooks.notify("rlx_on_rollouts", run=run, step=1, groups=groups)
    assert config.model_dump() == before
    assert len(groups) == 1


def test_observer_can_not_end_the_run_by_leaving(caplog, tmp_path: Path) -> None:
    hooks = Hooks()
    hooks.register(Meddler(), "meddler")
    hooks.notify("rlx_on_checkpoint", run=None, step=1, path=tmp_path)
    assert "rlx_on_checkpoint of plugin meddler raised" in caplog.text


def test_configuration_with_objects_is_shown_with_the_same_objects() -> None:
    lock = threading.Lock()  # can't be copied
    config = RunConfig.model_validate({"estimator": {"name": "x", "params": {"lock": lock}}})
    copy = detached(config)
    assert copy == config
    assert copy.estimator.params["lock"] is lock
    assert copy.estimator.params is not config.estimator.params


def test_what_a_tracker_does_to_metrics_and_samples_reaches_nobody() -> None:
    class Vandal:
        def log(self, step, metrics):
            metrics.clear()

        def log_samples(self, step, records):
            records[0]["text"] = "other"
            raise SystemExit(1)

    metrics, records = {"reward/mean": 1.0}, [{"text": "x"}]
    reporter = Reporter([PluginSystem().resolve("trackers", Vandal)])
    reporter.log(1, metrics)
    with pytest.warns(UserWarning, match="is off for the rest of the run"):
        reporter.log_samples(1, records)
    assert metrics == {"reward/mean": 1.0}
    assert records == [{"text": "x"}]
