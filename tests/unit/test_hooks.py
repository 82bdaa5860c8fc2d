"""Hooks: each is documented, its example runs, and its failure policy holds."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import logging
import os
import pickle
import re
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.core import hookspecs
from rlx.core.component import KINDS
from rlx.core.config import RunConfig
from rlx.core.hooks import Hooks
from rlx.core.hookspecs import HOOKS, WorkerContext
from rlx.core.plugins import PluginSystem
from rlx.core.registry import Provider
from rlx.core.rollouts import Group, Rollout, Task, TrainBatch
from rlx.core.shipping import shipped_modules
from rlx.core.worker_hooks import call_in_worker

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("hooks_page", ROOT / "scripts" / "hooks_page.py")
assert spec is not None
assert spec.loader is not None
hooks_page = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hooks_page)


def run_view(path: Path) -> types.SimpleNamespace:
    return types.SimpleNamespace(folder=path, config=RunConfig())


def group() -> Group:
    task = Task(id="t/0", prompt="p", tokens=[1])
    rollouts = [
        Rollout(
            task=task,
            group_id=0,
            index=index,
            tokens=np.array([1, 2], np.int32),
            spans=[],
            logprobs=np.zeros(0, np.float32),
            text=f"answer {index}",
            finish_reason="stop",
            reward=float(index),
        )
        for index in range(2)
    ]
    return Group(id=0, task=task, rollouts=rollouts)


def batch() -> TrainBatch:
    ones = np.ones(2, np.int64)
    return TrainBatch(
        tokens=np.ones(8, np.int32),
        lengths=np.array([4, 4]),
        action_lengths=np.array([1, 3]),
        action_positions=ones,
        turn=ones,
        group=ones,
        rollout_logprobs=np.zeros(4, np.float32),
        rewards=np.zeros(2),
        token_rewards=np.zeros(4),
    )


def example(hook: str) -> types.ModuleType:
    """Run the documented example as a plugin module."""
    module = types.ModuleType(f"example_of_{hook}")
    exec(hooks_page.sections(hook)["Example"], module.__dict__)
    return module


def system_with(*plugins: object) -> PluginSystem:
    system = PluginSystem()
    for number, plugin in enumerate(plugins):
        assert system.hook.register(plugin, f"plugin{number}") == []
        system._collect(f"plugin{number}", Provider(distribution=f"plugin{number}"))
    return system


def registers(kind: str):
    def check(system: PluginSystem, path: Path) -> None:
        (name,) = system.names(kind)
        assert system.resolve(kind, name).name == name

    return check


def resolves(system: PluginSystem, path: Path) -> None:
    assert system.resolve("losses", "team://neg").instance(3) == -3
    with pytest.raises(rlx.UsageError, match="no loss 'other'"):
        system.ref("losses", "other")


def configures(system: PluginSystem, path: Path) -> None:
    system.control("rlx_configure", config=RunConfig())
    hot = RunConfig.model_validate({"learner": {"lr": 1.0}})
    with pytest.raises(rlx.UsageError, match="destroys the model") as caught:
        system.control("rlx_configure", config=hot)
    assert "plugin0" in caught.value.__notes__[0]


def run_start(system: PluginSystem, path: Path) -> None:
    system.notify("rlx_on_run_start", run=run_view(path))
    assert (path / "started.txt").read_text() == "embedded\n"


def rollouts(system: PluginSystem, path: Path) -> None:
    system.notify("rlx_on_rollouts", run=run_view(path), step=1, groups=[group()])
    assert (path / "best.txt").read_text() == "answer 1"


def step_metrics(system: PluginSystem, path: Path) -> None:
    metrics = system.step_metrics(run=run_view(path), step=1, batch=batch())
    assert metrics == {"plugin0/longest": 3.0}


def step_end(system: PluginSystem, path: Path) -> None:
    run = run_view(path)
    system.notify("rlx_on_step_end", run=run, step=1, metrics={"policy/grad_norm": 120.0})


def eval_end(system: PluginSystem, path: Path) -> None:
    results = {"eval/data/mean": 0.5}
    system.notify("rlx_on_eval_end", run=run_view(path), step=3, results=results)
    assert (path / "eval-3.json").read_text() == '{"eval/data/mean": 0.5}'


def checkpoint(system: PluginSystem, path: Path) -> None:
    folder = path / "step-000002"
    system.notify("rlx_on_checkpoint", run=run_view(path), step=2, path=folder)
    assert (path / "checkpoints.txt").read_text() == "2 step-000002\n"


def should_stop(system: PluginSystem, path: Path) -> None:
    run = run_view(path)
    assert system.first("rlx_should_stop", run=run, step=1, metrics={"reward/mean": 0.1}) is None
    reason = system.first("rlx_should_stop", run=run, step=2, metrics={"reward/mean": 1.0})
    assert reason == "solved"


def run_end(system: PluginSystem, path: Path) -> None:
    system.notify("rlx_on_run_end", run=run_view(path), error=ValueError("no"))
    assert (path / "ended.txt").read_text() == "ValueError('no')"


def worker_start(system: PluginSystem, path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "x")
        patch.delenv("TOKENIZERS_PARALLELISM")
        system.control("rlx_on_worker_start", ctx=WorkerContext(role="learner"))
        assert "TOKENIZERS_PARALLELISM" not in os.environ
        system.control("rlx_on_worker_start", ctx=WorkerContext(role="reward"))
        assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


CHECKS = {
    **{f"rlx_register_{kind}": registers(kind) for kind in KINDS},
    "rlx_resolve": resolves,
    "rlx_configure": configures,
    "rlx_on_run_start": run_start,
    "rlx_on_rollouts": rollouts,
    "rlx_step_metrics": step_metrics,
    "rlx_on_step_end": step_end,
    "rlx_on_eval_end": eval_end,
    "rlx_on_checkpoint": checkpoint,
    "rlx_should_stop": should_stop,
    "rlx_on_run_end": run_end,
    "rlx_on_worker_start": worker_start,
}


@pytest.mark.parametrize("hook", HOOKS)
def test_documented_example_does_what_the_hook_is_for(
    hook: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    CHECKS[hook](system_with(example(hook)), tmp_path)
    if hook == "rlx_on_step_end":
        assert "gradient norm 120" in capsys.readouterr().out


def test_examples_of_components_compute() -> None:
    import torch

    from rlx.core.inputs import CorrectionInputs, EstimatorInputs, LossInputs

    lengths, group_index = torch.tensor([1, 2]), torch.tensor([0, 0])
    x = EstimatorInputs(
        lengths=lengths,
        group=group_index,
        rewards=torch.tensor([0.0, 1.0]),
        token_rewards=torch.tensor([0.0, 0.0, 1.0]),
    )
    assert example("rlx_register_estimators").zscore(x).sum() == pytest.approx(0.0)
    ones = torch.ones(3)
    loss = LossInputs(lengths=lengths, logprobs=-ones, old_logprobs=-ones, advantages=ones)
    assert example("rlx_register_losses").plain_pg(loss).tolist() == [-1.0] * 3
    mismatch = CorrectionInputs(lengths=lengths, old_logprobs=ones * 0, rollout_logprobs=-ones)
    assert example("rlx_register_corrections").half_clip(mismatch).tolist() == [1.5] * 3
    assert example("rlx_register_samplers").mixed_only(group())
    sample = types.SimpleNamespace(response="x" * 101)
    assert example("rlx_register_rewards").short(sample) == 0.0
    assert example("rlx_register_objectives").nll(loss).tolist() == [1.0] * 3


def test_example_of_an_agent_gives_a_hint_once() -> None:
    one_hint = example("rlx_register_agents").one_hint
    steps = [asyncio.run(one_hint(types.SimpleNamespace(index=index))) for index in (0, 1)]
    assert [step.done for step in steps] == [False, True]
    assert steps[0].observation == "Try again."


@pytest.mark.parametrize("hook", HOOKS)
def test_docstring_states_purpose_policy_arguments_and_example(hook: str) -> None:
    parts = hooks_page.sections(hook)
    info = HOOKS[hook]
    assert parts["summary"].endswith(".")
    assert parts["When"]
    assert info.process in parts["Process"]
    assert parts["Mode"].startswith("first result" if info.mode == "first" else info.mode)
    assert parts["On failure"]
    assert ("logged once" in parts["On failure"]) == info.isolated
    arguments = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    assert re.findall(r"^(\w+):", parts["Args"], re.MULTILINE) == arguments
    assert f"def {hook}(" in parts["Example"]


def test_every_spec_is_in_the_list_of_hooks() -> None:
    specs = {name for name in vars(hookspecs) if name.startswith("rlx_")}
    assert specs == set(HOOKS)


def test_hooks_page_is_up_to_date() -> None:
    assert hooks_page.PAGE.read_text(encoding="utf-8") == hooks_page.render()


def plugin(**functions: object) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{k: rlx.hookimpl(v) for k, v in functions.items()})


def test_raising_observer_is_logged_once_and_off_for_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[int] = []

    def bad(step):
        raise ValueError("broken observer")

    def good(step):
        seen.append(step)

    system = system_with(plugin(rlx_on_step_end=good), plugin(rlx_on_step_end=bad))
    with caplog.at_level(logging.ERROR):
        for step in (1, 2, 3):
            system.notify("rlx_on_step_end", run=None, step=step, metrics={})
    assert seen == [1, 2, 3]
    assert len(caplog.records) == 1
    assert "plugin1" in caplog.text
    assert "broken observer" in caplog.text
    system.notify("rlx_on_run_start", run=None)
    caplog.clear()
    system.notify("rlx_on_step_end", run=None, step=1, metrics={})
    assert len(caplog.records) == 1, "a new run gives it another chance"


def test_other_hooks_of_a_switched_off_observer_stay_on() -> None:
    ended: list[object] = []

    def bad(step):
        raise ValueError

    def end(error):
        ended.append(error)

    system = system_with(plugin(rlx_on_step_end=bad, rlx_on_run_end=end))
    system.notify("rlx_on_step_end", run=None, step=1, metrics={})
    system.notify("rlx_on_run_end", run=None, error=None)
    assert ended == [None]


def test_step_metrics_that_are_no_numbers_switch_that_implementation_off(
    caplog: pytest.LogCaptureFixture,
) -> None:
    system = system_with(
        plugin(rlx_step_metrics=lambda step: {"a": 1}),
        plugin(rlx_step_metrics=lambda step: {"b": "many"}),
    )
    for step in (1, 2):
        metrics = system.step_metrics(run=None, step=step, batch=None)
        assert metrics == {"plugin0/a": 1.0}
    assert len(caplog.records) == 1


def test_raising_control_hook_propagates_with_the_plugin_named() -> None:
    def stop(step):
        raise RuntimeError("no")

    system = system_with(plugin(rlx_should_stop=stop))
    with pytest.raises(RuntimeError) as caught:
        system.first("rlx_should_stop", run=None, step=1, metrics={})
    assert caught.value.__notes__ == ["raised by rlx_should_stop of plugin plugin0"]


def test_control_hook_that_leaves_is_an_error_of_its_plugin() -> None:
    def leave(config):
        raise SystemExit(0)

    with pytest.raises(rlx.ComponentError, match=r"plugin0 left with SystemExit\(0\)"):
        system_with(plugin(rlx_configure=leave)).control("rlx_configure", config=RunConfig())


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((None, None), None),
        ((False, None), None),
        (("late", False), "late"),
        ((None, True), "as plugin plugin1 asked"),
        ((None, ""), "as plugin plugin1 asked"),
        (("first registered", "solved"), "solved"),
    ],
)
def test_reason_to_stop_is_the_first_text(answers: tuple, reason: str | None) -> None:
    system = system_with(*(plugin(rlx_should_stop=answering(told)) for told in answers))
    assert system.stop_reason(run=None, step=1, metrics={}) == reason


def answering(told: object):
    def stop(step):
        return told

    return stop


def test_hook_that_would_have_to_be_awaited_or_iterated_is_reported() -> None:
    async def waits(step): ...

    def yields(step):
        yield step

    for function in (waits, yields):
        (oddity,) = Hooks().register(plugin(rlx_on_step_end=function), "p")
        assert "hooks are plain functions" in oddity


def test_first_result_stops_at_the_first_answer() -> None:
    calls: list[str] = []

    def answer(name, value):
        def implementation(step):
            calls.append(name)
            return value

        return implementation

    system = system_with(
        plugin(rlx_should_stop=answer("last", "b")),
        plugin(rlx_should_stop=answer("middle", "a")),
        plugin(rlx_should_stop=answer("first", None)),
    )
    assert system.first("rlx_should_stop", run=None, step=1, metrics={}) == "a"
    assert calls == ["first", "middle"]


def test_tryfirst_and_trylast_order_the_calls() -> None:
    calls: list[str] = []
    early = types.SimpleNamespace(
        rlx_configure=rlx.hookimpl(lambda config: calls.append("early"), tryfirst=True)
    )
    late = types.SimpleNamespace(
        rlx_configure=rlx.hookimpl(lambda config: calls.append("late"), trylast=True)
    )
    middle = plugin(rlx_configure=lambda config: calls.append("middle"))
    system_with(early, late, middle).control("rlx_configure", config=None)
    assert calls == ["early", "middle", "late"]


def test_misspelt_hook_is_reported_with_the_nearest_name() -> None:
    (oddity,) = Hooks().register(plugin(rlx_on_step_ended=lambda: None), "p")
    assert "rlx_on_step_ended" in oddity
    assert "did you mean 'rlx_on_step_end'?" in oddity


def test_parameter_with_a_default_is_reported() -> None:
    def implementation(run, step=1):
        return None

    (oddity,) = Hooks().register(plugin(rlx_on_step_end=implementation), "p")
    assert "a parameter with a default is never filled (step)" in oddity


def test_forgotten_decorator_is_reported() -> None:
    module = types.SimpleNamespace(rlx_on_run_end=lambda run: None)
    (oddity,) = Hooks().register(module, "p")
    assert oddity == "rlx_on_run_end has no @rlx.hookimpl, it is never called"


def test_hook_wrapper_is_reported_and_not_called() -> None:
    def wrapper(run):
        raise AssertionError
        yield

    hooks = Hooks()
    (oddity,) = hooks.register(
        types.SimpleNamespace(rlx_on_run_start=rlx.hookimpl(wrapper, wrapper=True)), "p"
    )
    assert "wrappers are not called" in oddity
    hooks.notify("rlx_on_run_start", run=None)


def test_unknown_argument_of_an_implementation_is_refused() -> None:
    from pluggy import PluginValidationError

    with pytest.raises(PluginValidationError, match="stepp"):
        Hooks().register(plugin(rlx_on_step_end=lambda stepp: None), "p")


def test_class_as_plugin_is_refused() -> None:
    class Plugin:
        @rlx.hookimpl
        def rlx_on_run_start(self, run):
            return None

    with pytest.raises(rlx.UsageError, match="is a class"):
        Hooks().register(Plugin, "p")
    assert Hooks().register(Plugin(), "p") == []


WORKER_HOOK = """
import pathlib, rlx

@rlx.hookimpl
def rlx_on_worker_start(ctx):
    (pathlib.Path(ctx.run_folder) / 'rank').write_text(f'{ctx.role} {ctx.rank}')
"""


def test_worker_process_calls_the_hook_of_the_projects_rlxfile(tmp_path: Path) -> None:
    (tmp_path / "rlxfile.py").write_text(WORKER_HOOK)
    ctx = WorkerContext(role="learner", rank=1, world_size=2, run_folder=str(tmp_path))
    assert PluginSystem.load(search_path=[tmp_path], rlxfile=False).worker_hooks() == ()
    refs = PluginSystem.load(search_path=[tmp_path]).worker_hooks()
    assert pickle.loads(pickle.dumps(refs)) == refs
    assert [str(path) for path in shipped_modules(refs)] == [str(tmp_path / "rlxfile.py")]
    call_in_worker(refs, ctx)
    assert (tmp_path / "rank").read_text() == "learner 1"


def test_worker_refuses_a_hook_plugin_with_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [one for one in sys.path if "pytest-of" not in one])
    ctx = WorkerContext(role="learner", rank=0, world_size=1, run_folder=str(tmp_path))
    (tmp_path / "rlxfile.py").write_text(WORKER_HOOK)
    refs = PluginSystem.load(search_path=[tmp_path]).worker_hooks()
    (tmp_path / "rlxfile.py").write_text(f"{WORKER_HOOK}# edited on this node\n")
    with pytest.raises(rlx.UsageError, match="differs between the driver and this process"):
        call_in_worker(refs, ctx)
    (tmp_path / "rlxfile.py").unlink()
    with pytest.raises(rlx.UsageError, match="is not in this process"):
        call_in_worker(refs, ctx)
    assert not (tmp_path / "rank").exists()


def test_run_offers_what_the_hooks_promise(tmp_path: Path) -> None:
    from rlx.core.hookspecs import RunView
    from rlx.core.run import Run

    run = Run(name="r", folder=tmp_path, config=RunConfig())
    promised = [name for name in vars(RunView) if not name.startswith("_")]
    assert sorted(promised) == ["config", "folder", "name", "start_step"]
    assert all(hasattr(run, name) for name in promised)
