"""`check_tracker`: what every tracker must hold, over made-up runs in a folder of its own."""

from __future__ import annotations

import contextlib
import copy
import io
import math
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.component import Bound
from rlx.core.config import RunConfig
from rlx.core.run import Run
from rlx.testing.cases import require
from rlx.testing.components import bind, check_parameters, check_travel
from rlx.testing.violations import EXAMPLES, Checker, label_of

_NAMES = ("reward/mean", "time/step", "policy/kl_ref", "my plugin/ü")
_STRANGE = (math.nan, math.inf, -math.inf, 1e300, -0.0)
RECORD: Mapping[str, Any] = {
    "group": 0,
    "index": 0,
    "task": "test/0",
    "prompt": "2 + 2 =",
    "response": "4 ✓\n",
    "label": "4",
    "reward": 1.0,
    "parts": {"right": 1.0},
    "advantage": 0.5,
    "finish_reason": "stop",
}
"""A sampled rollout, as `log_samples` is given it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """The metrics of the steps of a run."""

    steps: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        return f"metrics by step={[list(values) for values in self.steps]}"

    def metrics(self, step: int) -> dict[str, float]:
        """The metrics of a step, which is counted from 1."""
        return dict(zip(_NAMES, self.steps[step - 1], strict=False))


def check_tracker(target: Any, *, examples: int = EXAMPLES, **params: Any) -> None:
    """Check a tracker on made-up runs; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        examples: generated runs per rule.
        params: parameters of the component.
    """
    bound = bind("trackers", target, params)
    checker = Checker(f"tracker {label_of(target)}", examples=examples)
    ordinary = _stories(st.floats(-10, 10, allow_nan=False))
    if checker.holds("follows a run to its end", ordinary, lambda story: _follows(bound, story)):
        checker.holds(
            "copes with numbers that are not finite",
            _stories(st.sampled_from(_STRANGE)),
            lambda story: _follows(bound, story),
        )
        checker.once("closes when a run fails before its first step", lambda: _fails(bound))
        checker.holds("leaves its inputs as they are", ordinary, lambda s: _mutates(bound, s))
        checker.holds(
            "keeps what the earlier part of a resumed run wrote",
            ordinary.filter(lambda story: len(story.steps) > 1),
            lambda story: _resumes(bound, story),
        )
        story = Story(steps=((0.5, 1.0), (0.25, 1.0)))
        check_travel(checker, bound, story, files_written, _equal)
    check_parameters(checker, bound)
    checker.finish()


def files_written(bound: Bound, story: Story) -> int:
    """Follow a run and return how many files there are afterwards."""
    with _folder() as folder:
        _play(bound, folder, story)
        return sum(path.is_file() for path in folder.rglob("*"))


def _stories(numbers: SearchStrategy[float]) -> SearchStrategy[Story]:
    step = st.lists(numbers, max_size=len(_NAMES)).map(tuple)
    steps = st.lists(step, min_size=1, max_size=3).map(tuple)
    return steps.map(lambda values: Story(steps=values))


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A run's folder; what the tracker prints is nobody's business here."""
    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stdout(io.StringIO()):
        folder = Path(name) / "run"
        (folder / "checkpoints").mkdir(parents=True)
        yield folder


def _play(
    bound: Bound, folder: Path, story: Story, *, start: int = 0, stop: int | None = None
) -> None:
    """Tell a new tracker what the engine would tell it of the steps `start` + 1 … `stop`."""
    tracker = bound.ref.resolve()
    stop = len(story.steps) if stop is None else stop
    config = RunConfig(output=folder, steps=len(story.steps))
    run = Run(name=folder.name, folder=folder, config=config, start_step=start)
    _tell(tracker, "start", run)
    _tell(tracker, "status", "training")
    for step in range(start + 1, stop + 1):
        tracker.log(step, story.metrics(step))
        _tell(tracker, "log_samples", step, [dict(RECORD)])
    tracker.close(None)


def _tell(tracker: Bound, method: str, *args: Any) -> None:
    """Call a method that trackers may leave out."""
    function = getattr(tracker.instance, method, None)
    if function is not None:
        function(*args)


def _follows(bound: Bound, story: Story) -> None:
    with _folder() as folder:
        _play(bound, folder, story)


def _fails(bound: Bound) -> None:
    with _folder() as folder:
        tracker = bound.ref.resolve()
        _tell(tracker, "start", Run(name="run", folder=folder, config=RunConfig(output=folder)))
        tracker.close(RuntimeError("no engine"))


def _mutates(bound: Bound, story: Story) -> None:
    with _folder() as folder:
        tracker = bound.ref.resolve()
        _tell(tracker, "start", Run(name="run", folder=folder, config=RunConfig(output=folder)))
        metrics, records = story.metrics(1), [copy.deepcopy(dict(RECORD))]
        tracker.log(1, metrics)
        _tell(tracker, "log_samples", 1, records)
        tracker.close(None)
        require(metrics == story.metrics(1), "changed the metrics")
        require(records == [RECORD], "changed the records of rollouts")


def _resumes(bound: Bound, story: Story) -> None:
    with _folder() as folder:
        _play(bound, folder, story, stop=1)
        before = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
        _play(bound, folder, story, start=1)
        for path, size in before.items():
            name = path.relative_to(folder)
            require(path.is_file(), f"{name} is gone")
            require(path.stat().st_size >= size, f"{name} lost what was in it")


def _equal(first: int, second: int) -> bool:
    return first == second
