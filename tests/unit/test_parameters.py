from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import pytest

from rlx.core.errors import UsageError
from rlx.core.parameters import (
    parameter_docs,
    parameter_values,
    parameters_model,
    portable_values,
    type_name,
    validate_parameters,
)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Window(pydantic.BaseModel):
    low: float = 0.2
    high: float = 0.3


class Strict(pydantic.BaseModel, extra="forbid"):
    low: float = 0.0


def everything(
    x,
    *,
    eps: float = 1e-6,
    count: int = 1,
    flag: bool = False,
    mode: Literal["a", "b"] = "a",
    either: int | str = 0,
    maybe: float | None = None,
    names: list[str] = [],  # noqa: B006
    pair: tuple[float, float] = (0.0, 1.0),
    weights: dict[str, float] = {},  # noqa: B006
    colour: Colour = Colour.RED,
    path: Path = Path(),
    window: Window = Window(),
    bounded: Annotated[float, pydantic.Field(gt=0)] = 1.0,
    guessed=3,
    free=None,
):
    return x


def values(obj: Callable[..., Any] = everything, /, **given: Any) -> dict[str, Any]:
    return parameter_values(validate_parameters(obj, given, label="loss 'x'"))


def refusal(obj: Callable[..., Any] = everything, /, **given: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        validate_parameters(obj, given, label="loss 'x'", where="--set loss")
    return caught.value


def test_parameter_that_is_a_function_by_default_takes_any_other() -> None:
    def f(x, *, key=len, required):
        return x

    assert values(f, key=abs, required="x") == {"key": abs, "required": "x"}


def test_defaults_come_from_the_signature() -> None:
    got = values()
    assert got["eps"] == 1e-6
    assert got["window"] == Window()
    assert got["colour"] is Colour.RED
    assert "x" not in got


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("eps", "1e-5", 1e-5),
        ("count", "3", 3),
        ("flag", "true", True),
        ("flag", "no", False),
        ("mode", "b", "b"),
        ("either", "word", "word"),
        ("maybe", "0.5", 0.5),
        ("maybe", "null", None),
        ("names", "[a, b]", ["a", "b"]),
        ("pair", "[1, 2]", (1.0, 2.0)),
        ("weights", "{a: 1}", {"a": 1.0}),
        ("colour", "blue", Colour.BLUE),
        ("path", "a/b", Path("a/b")),
        ("window", "{low: 0.1}", Window(low=0.1)),
        ("bounded", "2", 2.0),
        ("guessed", "4", 4),
        ("free", "anything", "anything"),
    ],
)
def test_strings_of_the_command_line_become_the_annotated_type(
    name: str, text: str, value: object
) -> None:
    got = values(**{name: text})[name]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("eps", True),
        ("eps", "small"),
        ("eps", None),
        ("count", 1.5),
        ("count", True),
        ("flag", 2),
        ("mode", "c"),
        ("names", "word"),
        ("names", [1]),
        ("pair", [1.0]),
        ("colour", "green"),
        ("window", {"lo": "x", "low": "x"}),
        ("bounded", 0),
        ("guessed", "four"),
    ],
)
def test_wrong_types_are_refused_with_name_place_and_type(name: str, value: object) -> None:
    error = refusal(**{name: value})
    assert f"parameter {name!r} can't be {value!r}" in error.what
    assert error.where == f"--set loss.{name}"
    assert error.fix.startswith("a value of type ")


def test_number_for_a_text_is_refused_with_the_way_to_quote_it() -> None:
    def f(x, *, pattern: str):
        return x

    error = refusal(f, pattern=7)
    assert error.fix == """a value of type str, in quotes: '--set loss.pattern="7"'"""
    assert refusal(f, pattern=True).fix.endswith("""pattern="true"'""")
    assert refusal(f, pattern=None).fix.endswith("""pattern=""'""")


def test_unknown_name_is_refused_with_the_nearest_and_the_whole_list() -> None:
    error = refusal(epz=1.0)
    assert "no parameter 'epz'" in error.what
    assert "did you mean 'eps'?" in error.fix
    assert "mode: 'a' | 'b' = 'a'" in error.fix


def test_component_without_parameters_says_so() -> None:
    assert "it has no parameters" in refusal(lambda x: x, eps=1).fix


def test_required_parameter_is_asked_for() -> None:
    def needs(x, *, beta: float):
        return x

    assert "needs a value for 'beta'" in refusal(needs).what
    assert values(needs, beta=1)["beta"] == 1.0


def test_unknown_key_of_a_nested_strict_model_is_refused() -> None:
    def f(x, *, window: Strict = Strict()):
        return x

    assert "(at lo)" in refusal(f, window={"lo": 1.0}).what


class Inner(pydantic.BaseModel):
    high: float = pydantic.Field(1.0, validation_alias=pydantic.AliasChoices("high", "top"))


class Outer(pydantic.BaseModel):
    inner: Inner = Inner()
    several: list[Inner] = []


class Open(pydantic.BaseModel, extra="allow"):
    pass


@dataclasses.dataclass
class Plain:
    size: int = 1


def deep(
    x,
    *,
    outer: Outer = Outer(),
    plain: Plain = Plain(),
    by_name: dict[str, Inner] = {},  # noqa: B006
    more: Open = Open(),
):
    return x


@pytest.mark.parametrize(
    ("name", "value", "place"),
    [
        ("outer", {"iner": {}}, "outer.iner"),
        ("outer", "{inner: {hihg: 2}}", "outer.inner.hihg"),
        ("outer", {"several": [{"high": 1}, {"hgih": 2}]}, "outer.several.1.hgih"),
        ("by_name", {"a": {"hig": 2}}, "by_name.a.hig"),
    ],
)
def test_misspelt_key_of_a_nested_value_is_refused(name: str, value: object, place: str) -> None:
    error = refusal(deep, **{name: value})
    assert error.where == f"--set loss.{place}"
    assert "did you mean" in error.fix
    assert "there are: " in error.fix


def test_misspelt_field_of_a_dataclass_is_refused() -> None:
    assert "(at sice)" in refusal(deep, plain={"sice": 2}).what


def test_keys_that_a_nested_model_takes_are_left_alone() -> None:
    got = values(
        deep,
        outer={"inner": {"top": 2}, "several": [{"high": 3}]},
        by_name={"any name": {"high": 4}},
        more={"anything": 1},
    )
    assert got["outer"].inner.high == 2
    assert got["more"].anything == 1


def test_positional_option_is_named_as_such() -> None:
    def f(x, eps=1e-6):
        return x

    assert "put a * before it" in refusal(f, eps=1).fix


def test_defaults_are_shown_as_users_write_them() -> None:
    fix = refusal(nope=1).fix
    assert "colour: 'red' | 'blue' = 'red'" in fix
    assert "<Colour" not in fix
    assert "PosixPath" not in fix


def test_parameters_of_a_class_are_those_of_its_init() -> None:
    class Stateful:
        def __init__(self, *, decay: float = 0.9) -> None: ...

        def __call__(self, x, *, ignored: int = 0): ...

    assert values(Stateful, decay="0.5") == {"decay": 0.5}


def test_class_with_positional_parameters_is_refused() -> None:
    class Positional:
        def __init__(self, decay: float) -> None: ...

    assert "needs the positional argument 'decay'" in refusal(Positional).what


def test_callable_object_and_wrapped_function_keep_their_signature() -> None:
    class Scale:
        def __call__(self, x, *, by: float = 2.0):
            return x * by

    @functools.wraps(everything)
    def wrapper(*args, **kwargs):
        return everything(*args, **kwargs)

    assert values(Scale(), by="3") == {"by": 3.0}
    assert values(wrapper, eps="1e-3")["eps"] == 1e-3


def test_type_that_exists_only_for_type_checkers_is_explained() -> None:
    def f(x, *, window: OnlyForMypy = None):  # noqa: F821
        return x

    error = refusal(f, window=1)
    assert "OnlyForMypy" in error.what
    assert "TYPE_CHECKING" in error.fix


def test_parameter_may_have_the_name_of_a_model_method() -> None:
    def f(x, *, copy: int = 1, model_config: str = "a", _json: bool = False):
        return x

    assert values(f, copy="2") == {"copy": 2, "model_config": "a", "_json": False}


def test_values_that_travel_are_plain_and_only_what_was_set() -> None:
    model = validate_parameters(
        everything,
        {"colour": "blue", "path": "a", "window": {"low": 1}, "pair": [1, 2], "eps": float("inf")},
    )
    plain = portable_values(model)
    assert plain == {
        "colour": "blue",
        "path": "a",
        "window": {"low": 1.0, "high": 0.3},
        "pair": [1.0, 2.0],
        "eps": float("inf"),
    }
    assert validate_parameters(everything, plain).__dict__ == model.__dict__


def test_values_without_a_plain_form_travel_as_they_are() -> None:
    def f(x, *, inner: Any = None):
        return x

    marker = object()
    assert portable_values(validate_parameters(f, {"inner": marker})) == {"inner": marker}


def test_mutable_defaults_are_not_shared() -> None:
    first = values()
    first["names"].append("x")
    assert values()["names"] == []


def test_docs_come_from_function_class_and_init() -> None:
    def f(x, *, eps: float = 0.0):
        """Do it.

        Args:
            eps: keeps the
                division finite.
        """

    class C:
        """A thing.

        Parameters
        ----------
        a : int
            From the class.
        """

        def __init__(self, *, a: int = 0, b: int = 0) -> None:
            """Make it.

            :param b: From init.
            """

    assert parameter_docs(f) == {"eps": "keeps the division finite."}
    assert parameter_docs(C) == {"a": "From the class.", "b": "From init."}
    schema = parameters_model(f).model_json_schema()
    assert schema["properties"]["eps"]["description"] == "keeps the division finite."


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (float, "float"),
        (int | None, "int | None"),
        (Literal["a", "b"], "'a' | 'b'"),
        (list[dict[str, float]], "list[dict[str, float]]"),
        (tuple[int, ...], "tuple[int, …]"),
        (Colour, "'red' | 'blue'"),
        (Annotated[int, "x"], "int"),
        (Any, "Any"),
        (Window, "Window"),
    ],
)
def test_types_are_shown_as_users_write_them(annotation: object, text: str) -> None:
    assert type_name(annotation) == text
