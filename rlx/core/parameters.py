"""Keyword-only parameters of a function or class are its configuration: a strict pydantic model.

Strings (from `--set`, the environment, YAML's `1e-5`) are coerced to the annotated type;
everything else must already have it. Unknown names and wrong types are `UsageError`s.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any, Union, cast

import docstring_parser
import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from rlx.core.call_shape import positional_options
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.nested import stray_keys

_CONFIG = ConfigDict(extra="forbid", arbitrary_types_allowed=True, protected_namespaces=())
_FIELD = "parameter_"
"""Prefix of the model's fields; parameters are their aliases, so that one may be called `copy`,
`model_config` or `_secret`."""


def parameters_model(obj: Callable[..., Any], *, label: str | None = None) -> type[BaseModel]:
    """Build the model of an object's parameters, named after the object.

    Unannotated parameters take the type of their default. `**kwargs` is no configuration.
    Raises `UsageError` for a class whose `__init__` needs positional arguments, and for an
    annotation that can't be evaluated.
    """
    label = label or str(getattr(obj, "__name__", type(obj).__name__))
    signature, function = _signature(obj, label)
    if inspect.isclass(obj):
        _refuse_positional(signature, label)
    keyword_only = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    ]
    hints = _annotations(keyword_only, function, label)
    docs = parameter_docs(obj)
    fields: dict[str, Any] = {}
    for parameter in keyword_only:
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        settings = Field(default, alias=parameter.name, description=docs.get(parameter.name))
        fields[_FIELD + parameter.name] = (hints[parameter.name], settings)
    model: type[BaseModel] = pydantic.create_model(label, __config__=_CONFIG, **fields)
    return model


def validate_parameters(
    obj: Callable[..., Any],
    given: Mapping[str, Any],
    *,
    label: str | None = None,
    where: str | None = None,
) -> BaseModel:
    """Check `given` against the parameters; raises `UsageError` that lists what there is."""
    model = parameters_model(obj, label=label)
    label = label or model.__name__
    _refuse_unknown(obj, model, given, label, where)
    values = dict(given)
    try:
        try:
            checked = model.model_validate(values)
        except pydantic.ValidationError as error:
            reread = _reread_strings(values, error)
            checked = model.model_validate(reread)
            values = reread
    except pydantic.ValidationError as error:
        raise _usage_error(model, error, values, label, where) from error
    _refuse_stray_keys(values, checked, label, where)
    _refuse_booleans_as_numbers(model, values, checked, label, where)
    return checked


def parameter_values(model: BaseModel) -> dict[str, Any]:
    """Return the validated values by name, nested models kept as models."""
    return {name.removeprefix(_FIELD): value for name, value in model.__dict__.items()}


def parameter_fields(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return pydantic's description of each parameter by its name."""
    return {name.removeprefix(_FIELD): field for name, field in model.model_fields.items()}


def portable_values(model: BaseModel) -> dict[str, Any]:
    """Return what was set explicitly as plain JSON-like values, so that any process can read it.

    Objects that have no plain form (callables, tensors) stay as they are.
    """
    values: dict[str, Any] = {}
    for field in type(model).model_fields:
        if field not in model.model_fields_set:
            continue
        name = field.removeprefix(_FIELD)
        try:
            values[name] = model.model_dump(mode="json", include={field}, warnings="error")[field]
        except (pydantic.ValidationError, ValueError, TypeError):
            values[name] = model.__dict__[field]
    return values


def parameter_docs(obj: Callable[..., Any]) -> dict[str, str]:
    """Return the parameters' descriptions from the docstrings of an object and its `__init__`."""
    docs: dict[str, str] = {}
    for holder in (obj, getattr(obj, "__init__", None) if inspect.isclass(obj) else None):
        text = inspect.getdoc(holder) if holder is not None else None
        if not text:
            continue
        with contextlib.suppress(docstring_parser.ParseError):
            for entry in docstring_parser.parse(text).params:
                if entry.description:
                    docs[entry.arg_name] = " ".join(entry.description.split())
    return docs


def type_name(annotation: Any) -> str:
    """Return an annotation as a user would write it (`float`, `int | None`, `'a' | 'b'`)."""
    if annotation is Any:
        return "Any"
    if annotation is None or annotation is type(None):
        return "None"
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(arguments[0])
    if origin is typing.Literal:
        return " | ".join(repr(argument) for argument in arguments)
    if origin in (Union, types.UnionType):
        return " | ".join(type_name(argument) for argument in arguments)
    if origin is not None:
        inside = ", ".join("…" if item is ... else type_name(item) for item in arguments)
        return f"{getattr(origin, '__name__', str(origin))}[{inside}]"
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return " | ".join(repr(member.value) for member in annotation)
    return getattr(annotation, "__name__", str(annotation))


def shown_value(value: Any) -> str:
    """Return a value as a user would write it: `'fast'` for an enum's member, `.` for a path."""
    if isinstance(value, enum.Enum):
        return repr(value.value)
    return str(value) if isinstance(value, PurePath) else repr(value)


def _signature(obj: Callable[..., Any], label: str) -> tuple[inspect.Signature, Callable[..., Any]]:
    """Return the signature without `self`, and the function whose globals hold the annotations."""
    try:
        signature = inspect.signature(obj)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"{label!r} is a {type(obj).__name__}, not a function or class",
            fix="point the reference at a function, a class or a callable object",
        ) from error
    function: Any = obj
    if inspect.isclass(obj):
        function = obj.__init__
    elif not hasattr(obj, "__globals__") and not hasattr(obj, "__wrapped__"):
        function = getattr(obj, "func", None) or type(obj).__dict__.get("__call__", obj)
    return signature, cast("Callable[..., Any]", inspect.unwrap(function))


def _annotations(
    parameters: list[inspect.Parameter], function: Callable[..., Any], label: str
) -> dict[str, Any]:
    raw = {
        parameter.name: parameter.annotation
        for parameter in parameters
        if parameter.annotation is not inspect.Parameter.empty
    }
    scope = dict(getattr(function, "__globals__", {}))
    if getattr(function, "__closure__", None):
        scope |= inspect.getclosurevars(function).nonlocals
    holder = cast("Any", types.SimpleNamespace(__annotations__=raw))
    try:
        hints = typing.get_type_hints(holder, globalns=scope, include_extras=True)
    except (NameError, SyntaxError, TypeError, AttributeError) as error:
        raise UsageError(
            f"the parameter annotations of {label!r} can't be evaluated: {error}",
            where=getattr(function, "__module__", None),
            fix="import the types of keyword-only parameters at run time, "
            "not under `if TYPE_CHECKING:`",
        ) from error
    for parameter in parameters:
        if parameter.name not in hints:
            default = parameter.default
            known = default is not None and not callable(default)  # `empty` is a class
            hints[parameter.name] = type(default) if known else Any
    return hints


def _refuse_positional(signature: inspect.Signature, label: str) -> None:
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    for parameter in signature.parameters.values():
        if parameter.kind in positional and parameter.default is inspect.Parameter.empty:
            raise UsageError(
                f"{label}.__init__ needs the positional argument {parameter.name!r}",
                fix=f"parameters of components are keyword-only: "
                f"def __init__(self, *, {parameter.name}: …)",
            )


def _refuse_unknown(
    obj: Callable[..., Any],
    model: type[BaseModel],
    given: Mapping[str, Any],
    label: str,
    where: str | None,
) -> None:
    known = parameter_fields(model)
    for name in given:
        if name in known:
            continue
        hint = did_you_mean(name, known)
        if name in positional_options(obj):
            hint = f"{name!r} is positional: put a * before it, def …(x, *, {name}=…);"
        raise UsageError(
            f"{label} has no parameter {name!r}",
            where=_place(where, name),
            fix=" ".join(part for part in (hint, _listing(model)) if part),
        )


def _reread_strings(values: Mapping[str, Any], error: pydantic.ValidationError) -> dict[str, Any]:
    """Read the strings that were refused as YAML: `[1, 2]`, `null`, `{a: 1}` from a shell."""
    refused = {str(entry["loc"][0]) for entry in error.errors() if entry["loc"]}
    again = dict(values)
    for name in refused:
        if isinstance(values.get(name), str):
            with contextlib.suppress(yaml.YAMLError):
                again[name] = yaml.safe_load(values[name])
    return again


def _refuse_stray_keys(
    given: Mapping[str, Any], checked: BaseModel, label: str, where: str | None
) -> None:
    """pydantic passes over keys of nested models that these don't have: a typo would do nothing."""
    for name, value in given.items():
        for place, key, known in stray_keys(value, checked.__dict__[_FIELD + name], name):
            raise UsageError(
                f"{label}: {place!r} has no {key!r}",
                where=_place(where, f"{place}.{key}"),
                fix=f"{did_you_mean(key, known)} there are: {', '.join(known)}".strip(),
            )


def _refuse_booleans_as_numbers(
    model: type[BaseModel],
    given: Mapping[str, Any],
    checked: BaseModel,
    label: str,
    where: str | None,
) -> None:
    """pydantic takes `true` for 1, which hides a mistake in a YAML file."""
    for name, value in given.items():
        taken = checked.__dict__[_FIELD + name]
        if isinstance(value, bool) and type(taken) in (int, float):
            kind = type_name(parameter_fields(model)[name].annotation)
            raise UsageError(
                f"{label}: parameter {name!r} can't be {value!r}",
                where=_place(where, name),
                fix=f"a value of type {kind}",
            )


def _usage_error(
    model: type[BaseModel],
    error: pydantic.ValidationError,
    values: Mapping[str, Any],
    label: str,
    where: str | None,
) -> UsageError:
    missing = [
        str(entry["loc"][0])
        for entry in error.errors()
        if entry["type"] == "missing" and len(entry["loc"]) == 1
    ]
    if missing:
        names = ", ".join(repr(name) for name in missing)
        return UsageError(
            f"{label} needs a value for {names}", where=where, fix=f"set it; {_listing(model)}"
        )
    entry = error.errors()[0]
    name = str(entry["loc"][0])
    below = ".".join(
        str(part) for part in entry["loc"][1:] if not (isinstance(part, str) and "[" in part)
    )
    detail = f" (at {below})" if below else ""
    kind = type_name(parameter_fields(model)[name].annotation)
    value = values.get(name)
    fix = f"a value of type {kind}"
    if "str" in kind and (value is None or isinstance(value, (bool, int, float))):
        # --set and YAML read 1e5 as a number, true as a truth value and nothing as null
        text = "" if value is None else str(value).lower()
        fix += f""", in quotes: '{_place(where, name) or name}="{text}"'"""
    elif isinstance(value, str) and kind.startswith(("list[", "tuple[", "set[")):
        fix += ", in brackets: [a, b]"
    return UsageError(
        f"{label}: parameter {name!r} can't be {value!r}: {entry['msg']}{detail}",
        where=_place(where, name),
        fix=fix,
    )


def _listing(model: type[BaseModel]) -> str:
    if not model.model_fields:
        return "it has no parameters"
    described = []
    for name, field in parameter_fields(model).items():
        text = f"{name}: {type_name(field.annotation)}"
        described.append(text if field.is_required() else f"{text} = {shown_value(field.default)}")
    return f"parameters: {', '.join(described)}"


def _place(where: str | None, name: str) -> str | None:
    return f"{where}.{name}" if where else None
