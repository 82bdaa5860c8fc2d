"""`check_sampler`: what every sampler must hold, as a function or as a class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.component import Bound
from rlx.core.rollouts import Group
from rlx.core.samplers import BoundSampler
from rlx.testing.cases import require
from rlx.testing.components import bind, check_parameters, check_travel
from rlx.testing.scripted import group, task
from rlx.testing.violations import EXAMPLES, Broken, Checker, label_of

_SCORES = (0.0, 1.0, 0.5)
_MANY = 200
"""Tasks to draw before it counts as certain that a task is never drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Rewards of the groups of a few steps, and the number of tasks."""

    steps: tuple[tuple[tuple[float, ...], ...], ...]
    """Steps of groups of rewards."""
    tasks: int = 5
    seed: int = 0

    def __str__(self) -> str:
        rewards = [[list(rewards) for rewards in step] for step in self.steps]
        return f"rewards by step={rewards}, tasks={self.tasks}, seed={self.seed}"


def check_sampler(
    target: Any, *, part: str = "test", examples: int = EXAMPLES, **params: Any
) -> None:
    """Check a sampler on made-up groups; raises `ConformanceError` that lists every violation.

    Args:
        target: a reference (`name`, `pkg.mod:attr`, …), a function or a class.
        part: name of the reward part that the groups carry.
        examples: generated sessions per rule.
        params: parameters of the component.
    """
    bound = bind("samplers", target, params)
    checker = Checker(f"sampler {label_of(target)}", examples=examples)
    sessions = _sessions()
    runs = checker.holds(
        "gives tasks and judges groups", sessions, lambda s: _judges(bound, s, part)
    )
    if runs:
        _check_rules(checker, bound, sessions, part)
        game = Session(steps=(((0.0, 1.0), (1.0, 1.0)), ((0.0, 0.0), (0.5, 1.0))))
        check_travel(checker, bound, (game, part), session_outcome, _equal)
    check_parameters(checker, bound)
    checker.finish()


def _check_rules(
    checker: Checker, bound: Bound, sessions: SearchStrategy[Session], part: str
) -> None:
    checker.holds(
        "judges a group alike in whatever order its rollouts are",
        sessions,
        lambda s: _permuted(bound, s, part),
    )
    checker.holds("leaves the groups as they are", sessions, lambda s: _mutates(bound, s, part))
    checker.holds("is deterministic for a seed", sessions, lambda s: _repeats(bound, s, part))
    checker.holds(
        "goes on from a checkpoint as if it had not stopped",
        sessions.filter(lambda s: len(s.steps) > 1),
        lambda s: _resumes(bound, s, part),
    )
    checker.holds(
        "reaches every task sooner or later",
        sessions.map(lambda s: replace(s, steps=())),
        lambda s: _reaches_all(bound, s),
    )


def start(bound: Bound, session: Session) -> BoundSampler:
    """Return a fresh sampler over the session's tasks."""
    tasks = [task(number) for number in range(session.tasks)]
    return BoundSampler(bound.ref.resolve(), tasks, session.seed)


def play_step(
    sampler: BoundSampler, session: Session, step: int, part: str
) -> list[tuple[str, str | None]]:
    """Draw tasks, judge groups, show them; return (task, reason of the drop) by group."""
    rewards = session.steps[step]
    chosen = sampler.next_tasks(len(rewards))
    groups = [
        group(step * 10 + number, of, scores, part)
        for number, (of, scores) in enumerate(zip(chosen, rewards, strict=True))
    ]
    verdicts = [sampler.keep(each) for each in groups]
    sampler.update(groups)
    return [
        (each.task.id, None if verdict is None else verdict.reason)
        for each, verdict in zip(groups, verdicts, strict=True)
    ]


def session_outcome(bound: Bound, argument: tuple[Session, str]) -> list[Any]:
    """Play a session from its start; what happened, in values that can be compared."""
    session, part = argument
    sampler = start(bound, session)
    return [play_step(sampler, session, step, part) for step in range(len(session.steps))]


def _sessions() -> SearchStrategy[Session]:
    rewards = st.lists(st.sampled_from(_SCORES), min_size=1, max_size=3).map(tuple)
    step = st.lists(rewards, min_size=1, max_size=3).map(tuple)
    return st.builds(
        lambda steps, tasks, seed: Session(steps=tuple(steps), tasks=tasks, seed=seed),
        st.lists(step, min_size=1, max_size=3),
        st.integers(1, 5),
        st.integers(0, 3),
    )


def _judges(bound: Bound, session: Session, part: str) -> None:
    session_outcome(bound, (session, part))


def _groups(session: Session, part: str) -> list[Group]:
    rewards = [scores for step in session.steps for scores in step]
    return [group(number, task(number), scores, part) for number, scores in enumerate(rewards)]


def _permuted(bound: Bound, session: Session, part: str) -> None:
    for each in _groups(session, part):
        usual = start(bound, session).keep(each)
        backwards = replace(each, rollouts=list(each.rollouts)[::-1])
        other = start(bound, session).keep(backwards)
        require(
            usual == other,
            f"rewards {each.rewards}: {_said(usual)}; the other way round: {_said(other)}",
        )


def _mutates(bound: Bound, session: Session, part: str) -> None:
    sampler = start(bound, session)
    groups = _groups(session, part)
    before = copy.deepcopy([(each.rewards, dict(each.task.columns)) for each in groups])
    for each in groups:
        sampler.keep(each)
    sampler.update(groups)
    after = [(each.rewards, dict(each.task.columns)) for each in groups]
    require(before == after, "changed rewards or columns of a group in place")


def _repeats(bound: Bound, session: Session, part: str) -> None:
    first, second = (session_outcome(bound, (session, part)) for _ in range(2))
    require(first == second, f"two sessions give {first} and {second}")


def _resumes(bound: Bound, session: Session, part: str) -> None:
    whole = session_outcome(bound, (session, part))
    sampler = start(bound, session)
    half = len(session.steps) // 2
    for step in range(half):
        play_step(sampler, session, step, part)
    try:
        state = pickle.loads(pickle.dumps(sampler.state_dict()))
    except Exception as error:
        raise Broken(f"state_dict() can't be pickled: {error}") from error
    resumed = start(bound, session)
    resumed.load_state_dict(state)
    rest = [play_step(resumed, session, step, part) for step in range(half, len(session.steps))]
    require(rest == whole[half:], f"resumed it gives {rest} instead of {whole[half:]}")


def _reaches_all(bound: Bound, session: Session) -> None:
    sampler = start(bound, session)
    seen = {of.id for _ in range(_MANY) for of in sampler.next_tasks(1)}
    missing = {f"test/{number}" for number in range(session.tasks)} - seen
    require(not missing, f"never in {_MANY} draws: {sorted(missing)}")


def _said(verdict: Any) -> str:
    return "kept" if verdict is None else f"dropped ({verdict.reason})"


def _equal(first: Sequence[Any], second: Sequence[Any]) -> bool:
    return first == second
