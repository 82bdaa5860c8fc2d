"""What the checks of all kinds share: binding, state, a fresh process, parameters that travel."""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from rlx.core.component import Bound
from rlx.core.parameters import portable_values, validate_parameters
from rlx.core.plugins import default_system
from rlx.testing.nursery import call_in_fresh_process
from rlx.testing.violations import Broken, Checker


def bind(kind: str, target: Any, params: Mapping[str, Any]) -> Bound:
    """Resolve a reference, a function, a class or a `Bound`; raises `UsageError`."""
    if isinstance(target, Bound):
        return target.ref.resolve()
    return default_system().resolve(kind, target, params)


class Restarted(Bound):
    """A component with state whose every call is the first one of a run."""

    __slots__ = ()

    def __call__(self, *args: Any) -> Any:
        return self.ref.resolve()(*args)


def restarted(bound: Bound) -> Bound:
    """Return a component whose calls don't depend on each other: with state, a `Restarted` one."""
    if not keeps_state(bound):
        return bound
    return Restarted(ref=bound.ref, obj=bound.ref.load(), params=bound.params)


def keeps_state(bound: Bound) -> bool:
    """Say whether checkpoints carry something for a component."""
    return callable(getattr(bound.instance, "state_dict", None))


def check_state(
    checker: Checker,
    bound: Bound,
    cases: SearchStrategy[Any],
    call: Callable[[Bound, Any, int], Any],
    same: Callable[[Any, Any], bool],
) -> None:
    """Check that a component with state goes on from a checkpoint; others have nothing to check.

    Args:
        call: calls the component on a case in step 0, 1 …
    """
    if not keeps_state(bound):
        return

    def resumes(pair: tuple[Any, Any]) -> None:
        whole, stopped, resumed = (bound.ref.resolve() for _ in range(3))
        for one in (whole, stopped):
            call(one, pair[0], 0)
        resumed.load_state_dict(saved(stopped.state_dict()))
        expected, got = call(whole, pair[1], 1), call(resumed, pair[1], 1)
        if not same(expected, got):
            raise Broken(f"after a checkpoint it gives {got!r} instead of {expected!r}")

    pairs = st.tuples(cases, cases)
    checker.holds("goes on from a checkpoint as if it had not stopped", pairs, resumes)


def saved(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a state as a checkpoint gives it back."""
    import torch

    file = io.BytesIO()
    try:
        torch.save(dict(state), file)
        file.seek(0)
        restored: dict[str, Any] = torch.load(file, weights_only=True)
    except Exception as error:
        raise Broken(
            "the state can't be saved: it is to consist of numbers, texts, lists, dicts and "
            f"tensors ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error
    return restored


def check_travel(
    checker: Checker,
    bound: Bound,
    argument: Any,
    call: Callable[[Bound, Any], Any],
    same: Callable[[Any, Any], bool],
) -> None:
    """Check that another process makes the same component of the reference.

    Args:
        argument: picklable input.
        call: module-level function that calls the component in either process.
    """

    def travels() -> None:
        there = in_fresh_process(bound, argument, call)
        here = call(bound.ref.resolve(), argument)
        if not same(here, there):
            raise Broken(f"a fresh process computes {there!r}, this one {here!r}")

    checker.once("resolves in another process to the same component", travels)


def in_fresh_process(bound: Bound, argument: Any, call: Callable[[Bound, Any], Any]) -> Any:
    """Return `call(component, argument)` as a process computes it that shares nothing but disk."""
    try:
        message = pickle.dumps((bound.ref, call, argument))
    except Exception as error:
        raise Broken(f"the reference can't be pickled: {error}") from error
    try:
        return call_in_fresh_process(message)
    except RuntimeError as error:
        raise Broken(f"it fails there:\n{str(error)[-2000:]}") from error


def check_parameters(checker: Checker, bound: Bound) -> None:
    """Check that all parameters, defaults included, survive JSON and are taken back unchanged."""
    obj = bound.ref.load()

    def round_trip() -> None:
        model = validate_parameters(obj, bound.params, label=bound.name)
        for name, value in portable_values(model).items():
            try:
                read = json.loads(json.dumps(value))
            except (TypeError, ValueError) as error:
                raise Broken(
                    f"parameter {name!r} = {bound.params[name]!r} has no plain form, so it can't "
                    f"be written to config.yaml: {error}"
                ) from error
            again = validate_parameters(obj, {**bound.params, name: read}, label=bound.name)
            if not _same_value(again.__dict__, model.__dict__):
                raise Broken(f"parameter {name!r} = {bound.params[name]!r} comes back as {read!r}")

    checker.once("parameters survive config.yaml", round_trip)


def _same_value(first: Any, second: Any) -> bool:
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _same_value(first[key], second[key]) for key in first
        )
    if isinstance(first, float) and isinstance(second, float) and math.isnan(first):
        return math.isnan(second)
    return bool(first == second)
