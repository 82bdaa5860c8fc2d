"""What the checks of all kinds share: binding, a fresh process, parameters that travel."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable, Mapping
from typing import Any

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
