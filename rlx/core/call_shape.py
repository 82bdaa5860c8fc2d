"""How a component can be called: refused on the driver when that is not with one argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final

from rlx.core.errors import UsageError

_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_METHODS_INSTEAD: Final = frozenset({"agents", "samplers", "trackers"})
"""Kinds whose classes may have methods of other names in place of a call."""


def check_call(obj: Any, *, kind: str, label: str, where: str | None = None) -> None:
    """Check that a function, class or object can be called with its inputs alone.

    Raises `UsageError` for a class without `__call__` and for a call that takes no positional
    argument, or needs more than one.
    """
    call: Any = obj
    if inspect.isclass(obj):
        call = _instance_call(obj)
        if call is None:
            if kind in _METHODS_INSTEAD:
                return
            raise UsageError(
                f"{label} is a class whose instances can't be called",
                where=where,
                fix="define __call__(self, x)",
            )
    positional = _positional(call)
    if positional is None:
        return
    names = [parameter.name for parameter in positional]
    needed = [one.name for one in positional if one.default is inspect.Parameter.empty]
    if not names:
        raise UsageError(
            f"{label} takes no positional argument; it is called with its inputs",
            where=where,
            fix="def …(x, *, …)",
        )
    if len(needed) > 1:
        raise UsageError(
            f"{label} needs {len(needed)} positional arguments ({', '.join(needed)}); "
            "it is called with one, its inputs",
            where=where,
            fix=f"parameters are keyword-only: def …({needed[0]}, *, {', '.join(needed[1:])})",
        )


def positional_options(obj: Any) -> list[str]:
    """Return parameters that have a default and are positional: they can't be configured."""
    call = _instance_call(obj) if inspect.isclass(obj) else obj
    found = (_positional(call) or [])[1:]
    return [one.name for one in found if one.default is not inspect.Parameter.empty]


def _instance_call(cls: type) -> Any:
    """Return `__call__` as a class defines or inherits it, bound to nothing; None without one."""
    for base in cls.__mro__[:-1]:
        if "__call__" in vars(base):
            return _Unbound(vars(base)["__call__"])
    return None


class _Unbound:
    """A method that was looked up in a class."""

    def __init__(self, method: Any) -> None:
        self.has_self = not isinstance(method, staticmethod)
        self.function: Callable[..., Any] = getattr(method, "__func__", method)


def _positional(call: Any) -> list[inspect.Parameter] | None:
    """Return the positional parameters without `self`; None where any number is taken, or where
    there is no telling."""
    function, skipped = (
        (call.function, int(call.has_self)) if isinstance(call, _Unbound) else (call, 0)
    )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return None
    if any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in parameters):
        return None
    return [one for one in parameters if one.kind in _POSITIONAL][skipped:]
