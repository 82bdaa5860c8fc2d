"""The kit on components with state, and on trackers: every rule has one that breaks it alone."""

from __future__ import annotations

import ast
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

import rlx
from rlx import testing
from rlx.testing import (
    ConformanceError,
    check_correction,
    check_estimator,
    check_loss,
    check_reward,
    check_tracker,
)

EXAMPLES = 12
IN_CHILD = sys.argv[0].endswith("nursery.py")
RESUMES = "goes on from a checkpoint as if it had not stopped"
ONCE = "counts a step once, in however many micro-batches it comes"


def broken_rules(check, component, **options) -> list[str]:
    try:
        check(component, examples=EXAMPLES, **options)
    except ConformanceError as error:
        return [violation.rule for violation in error.violations]
    return []


class Total:
    """What components with state have in common here: a running sum of something."""

    def __init__(self) -> None:
        self.total = 0.0

    def state_dict(self):
        return {"total": self.total}

    def load_state_dict(self, state):
        self.total = state["total"]


class RunningBaseline(Total):
    """Rewards minus the mean of all earlier batches' means."""

    def __call__(self, x):
        advantages = x.rewards - self.total
        self.total = 0.5 * self.total + 0.5 * float(x.rewards.mean())
        return advantages


class Damped(Total):
    """A policy gradient that gets smaller with the steps that were taken."""

    def __init__(self) -> None:
        self.steps = 0
        self.last = -1

    def __call__(self, x):
        step = x.metadata.get("step", self.last)
        if step != self.last:
            self.steps, self.last = self.steps + 1, step
        return -x.ratio * x.advantages / (1 + self.steps)

    def state_dict(self):
        return {"steps": self.steps, "last": self.last}

    def load_state_dict(self, state):
        self.steps, self.last = state["steps"], state["last"]


class DampedByCalls(Damped):
    def __call__(self, x):
        self.steps += 1
        return -x.ratio * x.advantages / (1 + self.steps)


class GrowingBound(Total):
    def __call__(self, x):
        self.total += 1.0
        return x.ratio.clamp(max=self.total)


class Novelty(Total):
    """1 for a response that is longer than all earlier ones together."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def __call__(self, sample):
        with self.lock:
            score = float(len(sample.response) > self.total)
            self.total += len(sample.response)
        return score


def forgetful(component: type) -> type:
    """Return the component with a state that is not taken back."""
    name = f"Forgetful{component.__name__}"
    return type(name, (component,), {"load_state_dict": lambda self, state: None})


FORGETS = {name.__name__: forgetful(name) for name in (RunningBaseline, GrowingBound, Novelty)}
ForgetfulRunningBaseline = FORGETS["RunningBaseline"]
ForgetfulGrowingBound = FORGETS["GrowingBound"]
ForgetfulNovelty = FORGETS["Novelty"]
ForgetfulDamped = forgetful(Damped)


@pytest.mark.parametrize(
    ("check", "component"),
    [
        (check_estimator, RunningBaseline),
        (check_loss, Damped),
        (check_correction, GrowingBound),
        (check_reward, Novelty),
    ],
)
def test_right_component_with_state_passes(check, component) -> None:
    check(component, examples=EXAMPLES)


@pytest.mark.parametrize(
    ("check", "component"),
    [
        (check_estimator, ForgetfulRunningBaseline),
        (check_loss, ForgetfulDamped),
        (check_correction, ForgetfulGrowingBound),
        (check_reward, ForgetfulNovelty),
    ],
)
def test_component_that_forgets_its_state_is_caught_by_that_rule_alone(check, component) -> None:
    assert broken_rules(check, component) == [RESUMES]


def test_loss_that_counts_micro_batches_is_caught_by_that_rule_alone() -> None:
    assert broken_rules(check_loss, DampedByCalls) == [ONCE]


class Opaque(RunningBaseline):
    def state_dict(self):
        return {"total": self}


def test_state_that_a_checkpoint_can_not_hold_is_named() -> None:
    with pytest.raises(ConformanceError, match="numbers, texts, lists, dicts and tensors"):
        check_estimator(Opaque, examples=EXAMPLES)


class Lines:
    """A line per step."""

    mode = "a"

    def __init__(self, *, file: str = "lines.txt") -> None:
        self.file = file

    def start(self, run):
        self.open = (run.folder / self.file).open(self.mode)

    def log(self, step, metrics):
        print(step, *metrics.values(), file=self.open)

    def close(self, error=None):
        self.open.close()


class ForgetsToAppend(Lines):
    mode = "w"


class CountsSteps(Lines):
    def close(self, error=None):
        self.open.seek(self.steps)
        super().close()

    def log(self, step, metrics):
        self.steps = step


class NeedsNumbers(Lines):
    def log(self, step, metrics):
        for value in metrics.values():
            print(int(value * 1000), file=self.open)


class RoundsInPlace(Lines):
    def log(self, step, metrics):
        for name in metrics:
            metrics[name] = 0.0


class NeedsARun(Lines):
    def log(self, step, metrics):
        raise ValueError("no")


class OtherElsewhere(Lines):
    def start(self, run):
        super().start(run)
        if IN_CHILD:
            (run.folder / "child.txt").touch()


class Unplain(Lines):
    def __init__(self, *, to: object = object()) -> None:
        super().__init__()


TRACKERS = {
    "follows a run to its end": NeedsARun,
    "copes with numbers that are not finite": NeedsNumbers,
    "closes when a run fails before its first step": CountsSteps,
    "leaves its inputs as they are": RoundsInPlace,
    "keeps what the earlier part of a resumed run wrote": ForgetsToAppend,
    "resolves in another process to the same component": OtherElsewhere,
    "parameters survive config.yaml": Unplain,
}


def test_right_tracker_passes() -> None:
    check_tracker(Lines, examples=EXAMPLES, file="mine.txt")


@pytest.mark.parametrize("rule", TRACKERS)
def test_wrong_tracker_is_caught_by_its_rule_alone(rule: str) -> None:
    assert broken_rules(check_tracker, TRACKERS[rule]) == [rule]


def test_a_components_state_does_not_leak_from_one_check_into_the_next() -> None:
    bound = rlx.resolve("estimators", RunningBaseline)
    bound(rlx.testing.estimator_inputs(rewards=torch.ones(2)))
    check_estimator(bound, examples=EXAMPLES)


def rules_of(path: Path) -> set[str]:
    """The rules that a module of the kit checks, as they stand in its calls and tables."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = [
        node.args[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"holds", "once"}
        and node.args
    ]
    tables = [loop.iter for loop in ast.walk(tree) if isinstance(loop, ast.For)]
    found += [
        row.elts[0]
        for table in tables
        if isinstance(table, ast.Tuple)
        for row in table.elts
        if isinstance(row, ast.Tuple)
    ]
    return {str(one.value) for one in found if isinstance(one, ast.Constant) and " " in one.value}


def test_every_rule_of_the_kit_has_a_component_that_breaks_it() -> None:
    kit = Path(testing.__file__).parent
    told = "\n".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_kit_*.py")
    )
    checked = {path.name: rules_of(path) for path in kit.glob("*.py")}
    kinds = {"estimators", "losses", "corrections", "rewards", "agents", "samplers", "trackers"}
    assert all(len(checked[f"{kind}.py"]) >= 3 for kind in kinds)
    every = Counter(rule for rules in checked.values() for rule in rules)
    missing = {rule for rule, kinds in every.items() if told.count(f'"{rule}"') < kinds}
    assert not missing
