"""A component that can't be called with its inputs is refused before anything is started."""

from __future__ import annotations

import functools
import math

import pytest

from rlx.core.call_shape import check_call, positional_options
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem


class Fine:
    def __init__(self, *, k: int = 1) -> None: ...

    def __call__(self, x, *, extra: int = 0): ...


class Inherits(Fine): ...


class NoCall: ...


class NeedsTwo:
    def __call__(self, x, y): ...


class Methods:
    def method(self, x): ...

    @staticmethod
    def static(x, *, k: int = 1): ...

    @classmethod
    def of_class(cls, x): ...


def one(x): ...
def option(x, eps=1.0): ...
def anything(*arguments): ...
def two(x, y): ...
def none(*, k: int = 1): ...


@pytest.mark.parametrize(
    "obj",
    [
        *(Fine, Inherits, Fine(), one, option, anything, functools.partial(two, 1)),
        *(Methods.static, Methods.of_class, lambda x: x, math.sqrt, print),
    ],
)
def test_call_with_one_argument_is_right(obj: object) -> None:
    check_call(obj, kind="losses", label="loss 'x'")


@pytest.mark.parametrize(
    ("obj", "words"),
    [
        (NoCall, "can't be called"),
        (NeedsTwo, r"needs 2 positional arguments \(x, y\)"),
        (two, r"needs 2 positional arguments \(x, y\)"),
        (Methods.method, r"needs 2 positional arguments \(self, x\)"),
        (none, "takes no positional argument"),
    ],
)
def test_other_calls_are_refused(obj: object, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        check_call(obj, kind="estimators", label="estimator 'x'", where="--estimator")
    assert caught.value.where == "--estimator"
    assert "def" in caught.value.fix


def test_samplers_agents_and_trackers_may_have_methods_instead_of_a_call() -> None:
    for kind in ("samplers", "agents", "trackers"):
        check_call(NoCall, kind=kind, label="it")


def test_positional_options_are_found() -> None:
    assert positional_options(option) == ["eps"]
    assert positional_options(Fine) == positional_options(one) == []


def test_selection_checks_the_call() -> None:
    with pytest.raises(UsageError, match="needs 2 positional arguments"):
        PluginSystem().ref("losses", two, where="loss")


def test_component_that_can_not_be_constructed_is_named_with_its_own_traceback() -> None:
    class Picky:
        def __init__(self, *, k: int = 1) -> None:
            raise ValueError(f"no such k: {k}")

        def __call__(self, x): ...

    ref = PluginSystem().ref("losses", Picky, {"k": 3})
    with pytest.raises(UsageError, match="could not be constructed") as caught:
        ref.resolve()
    assert "ValueError: no such k: 3" in caught.value.what
    assert "references.py" not in caught.value.what
