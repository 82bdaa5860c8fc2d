"""What the types of `RunConfig` say about a setting: its key, its field, what it may be."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rlx.core.config import Part, RunConfig
from rlx.core.errors import did_you_mean
from rlx.core.yaml_text import dump_value


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of a run's configuration, in order."""
    return tuple(_keys(RunConfig, ""))


def key_of_location(location: tuple[int | str, ...]) -> tuple[str, FieldInfo | None]:
    """Dotted key and field of a pydantic error's location (which also names union members)."""
    part: type[Part] | None = RunConfig
    words: list[str] = []
    field: FieldInfo | None = None
    for word in location:
        if isinstance(word, int):
            words.append(str(word))
            continue
        inner = part.model_fields.get(word) if part else None
        if inner is None:
            break
        field = inner
        words.append(word)
        part = section_of(field)[0]
    return ".".join(words), field


def allowed_values(field: FieldInfo | None, value: Any, message: str) -> str:
    """Say what a setting may be, and what it was: `'fast' is not allowed; one of vllm, …`."""
    if field is None:
        return message
    options = options_of(field.annotation)
    if get_origin(field.annotation) is list and isinstance(value, str):  # one of its items
        items = options_of(get_args(field.annotation)[0])
        options = items if any(isinstance(item, str) for item in items) else options
    words = [option for option in options if isinstance(option, str)]
    bounds = " and ".join(
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if getattr(rule, name, None) is not None
    )
    kinds = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
    parts = [f"{kinds[kind]} {bounds}".rstrip() for kind in kinds if kind in options]
    if words:
        parts.append(f"one of {', '.join(words)}" if len(words) > 1 else words[0])
    if any(get_origin(option) in (list, tuple) for option in options):
        parts = ["a list"]
    if not parts:
        return f"{dump_value(value)} is not allowed: {message}"
    if None in options:
        parts.append("null")
    text = f"{dump_value(value)} is not allowed; it is {' or '.join(parts)}"
    return with_hint(text, did_you_mean(value, words) if isinstance(value, str) else "")


def _keys(part: type[Part], above: str) -> Iterator[str]:
    for name, field in part.model_fields.items():
        section, is_list = section_of(field)
        yield f"{above}{name}"
        if section is not None and not is_list:
            yield from _keys(section, f"{above}{name}.")


def nearest_key(key: str) -> str:
    """`lr` → `learner.lr`, `estimater.eps` → `estimator.eps`; empty when nothing is near."""
    root, dot, below = key.partition(".")
    roots = difflib.get_close_matches(root, RunConfig.model_fields, n=1)
    if root not in RunConfig.model_fields and dot and roots:
        return f"{roots[0]}.{below}"
    keys = known_keys()
    if near := difflib.get_close_matches(key, keys, n=1):
        return near[0]
    ends = {name.rpartition(".")[2]: name for name in reversed(keys)}
    near = difflib.get_close_matches(key.rpartition(".")[2], ends, n=1)
    return ends[near[0]] if near else ""


def section_of(field: FieldInfo) -> tuple[type[Part] | None, bool]:
    """The `Part` that a field holds, and whether it holds a list of them."""
    annotation = field.annotation
    is_list = get_origin(annotation) is list
    if is_list:
        annotation = get_args(annotation)[0]
    if isinstance(annotation, type) and issubclass(annotation, Part):
        return annotation, is_list
    return None, False


def field_at(key: str) -> FieldInfo | None:
    """The field of a dotted key; None for parameters of components and unknown keys."""
    found, field = key_of_location(
        tuple(int(word) if word.isdigit() else word for word in key.split("."))
    )
    return field if found == key else None


def options_of(annotation: Any) -> list[Any]:
    """Members of a union, values of literals, None for null."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        return [option for inner in get_args(annotation) for option in options_of(inner)]
    if origin is Literal:
        return list(get_args(annotation))
    return [None] if annotation is type(None) else [annotation]


def with_hint(text: str, hint: str) -> str:
    """`text; hint`, or the text alone."""
    return f"{text}; {hint}" if hint else text
