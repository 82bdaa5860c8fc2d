"""Turns a target or an object into a checked `ComponentRef`; runs on the driver."""

from __future__ import annotations

import ast
import hashlib
import inspect
import itertools
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlx.core.call_shape import check_call
from rlx.core.component import Tags, singular, tags_of
from rlx.core.errors import UsageError
from rlx.core.importing import FILE_PREFIX, import_target, search_root
from rlx.core.parameters import parameter_values, portable_values, validate_parameters
from rlx.core.references import ComponentRef, pickle_object, source_hash
from rlx.core.registry import Provider


def make_ref(
    kind: str,
    name: str,
    source: Any,
    *,
    where: str | None = None,
    provider: Provider | None = None,
    search_path: Iterable[str] = (),
) -> ComponentRef:
    """Return the reference to `source` (`module:attr`, `file.py:attr` or an object), without
    parameters."""
    target = source if isinstance(source, str) else target_of(source)
    if target is None:  # defined in a function, or a lambda
        return _pickled(kind, name, source, provider, search_path)
    place, _, attribute = target.rpartition(":")
    if not place or not attribute:
        raise UsageError(
            f"{target!r} is no reference", where=where, fix="pkg.mod:attr or path/to/file.py:attr"
        )
    if place.endswith(".py"):
        place = str(Path(place).expanduser().resolve())
        target = f"{place}:{attribute}"
    label = describe(kind, name, provider)
    obj = import_target(target, label=label, where=where, search_path=search_path)
    if place == "__main__":
        return _pickled(kind, name, obj, provider, search_path)
    return ComponentRef(
        kind=kind,
        name=name,
        target=target,
        source_hash=source_hash(obj, target),
        search_path=_paths_for(place, obj, search_path),
        distribution=provider.distribution if provider else None,
        version=provider.version if provider else None,
    )


def checked(ref: ComponentRef, params: Mapping[str, Any], where: str | None) -> ComponentRef:
    """Return the reference with validated parameters; raises `UsageError`."""
    obj = ref.load()
    label = f"{singular(ref.kind)} {ref.name!r}"
    if not callable(obj) and ref.kind != "trackers":
        raise UsageError(
            f"{label} is a {type(obj).__name__}, not a function or class",
            where=where,
            fix="point the reference at a function, a class or a callable object",
        )
    check_call(obj, kind=ref.kind, label=label, where=where)
    model = validate_parameters(obj, params, label=label, where=where)
    _check_order(tags_of(obj), parameter_values(model), label, where)
    return replace(ref, params=portable_values(model))


def _check_order(tags: Tags, values: Mapping[str, Any], label: str, where: str | None) -> None:
    """Parameters that must not fall don't; None stands for no limit."""
    given = [(name, values[name]) for name in tags.ordered if values.get(name) is not None]
    for (first, low), (second, high) in itertools.pairwise(given):
        if low > high:
            raise UsageError(
                f"{label}: {first} ({low:g}) is larger than {second} ({high:g})",
                where=where,
                fix=f"{first} at most {second}",
            )


def describe(kind: str, name: str, provider: Provider | None) -> str:
    """Return how messages call a component: `estimator 'x' (rlx-foo 0.3)`."""
    label = f"{singular(kind)} {name!r}"
    return label if provider is None or provider.builtin else f"{label} ({provider})"


def object_name(obj: Any) -> str:
    """Return the name under which an object that was passed itself is shown."""
    return str(getattr(obj, "__qualname__", type(obj).__qualname__)).rpartition(">.")[2]


def target_of(obj: Any) -> str | None:
    """Return the target under which other processes find an object; None when they can't."""
    name = getattr(obj, "__qualname__", None)
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    if module is None or not isinstance(name, str):
        return None
    try:
        if operator.attrgetter(name)(module) is not obj:
            return None
    except AttributeError:
        return None
    if module.__name__.startswith(FILE_PREFIX):
        return f"{module.__file__}:{name}"
    return f"{module.__name__}:{name}"


def file_without_attribute(kind: str, path: str, where: str | None) -> UsageError:
    """Return the error for `file.py` without `:attr`, with what the file defines."""
    try:
        tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        names = []
    else:
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        names = [
            node.name
            for node in tree.body
            if isinstance(node, defined) and not node.name.startswith("_")
        ]
    ways = " or ".join(f"{path}:{name}" for name in names) or f"{path}:function"
    return UsageError(
        f"{path!r} names a file, not the {singular(kind)} in it", where=where, fix=ways
    )


def _pickled(
    kind: str, name: str, obj: Any, provider: Provider | None, search_path: Iterable[str]
) -> ComponentRef:
    module = getattr(obj, "__module__", None) or type(obj).__module__
    return ComponentRef(
        kind=kind,
        name=name,
        target=f"{module}:{getattr(obj, '__qualname__', type(obj).__qualname__)}",
        payload=pickle_object(obj),
        source_hash=_text_hash(obj),
        # what the object refers to is pickled by name: other processes import it
        search_path=tuple(dict.fromkeys([*_roots(module), *search_path])),
        distribution=provider.distribution if provider else None,
        version=provider.version if provider else None,
    )


def _paths_for(place: str, obj: Any, search_path: Iterable[str]) -> tuple[str, ...]:
    """Return the folders without which another process could not import the target."""
    if place.endswith(".py"):
        return tuple(dict.fromkeys([str(Path(place).parent), *search_path]))
    roots = _roots(place, getattr(obj, "__module__", None) or place)
    return tuple(dict.fromkeys([*roots, *search_path])) if roots else ()


def _text_hash(obj: Any) -> str | None:
    """Return the sha256 of an object's own source text, for the manifest; None in a bare REPL."""
    try:
        is_definition = inspect.isclass(obj) or inspect.isroutine(obj)
        text = inspect.getsource(obj if is_definition else type(obj))
    except (OSError, TypeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest()


def _roots(*modules: str) -> list[str]:
    found = (search_root(module) for module in sorted(set(modules)) if module != "__main__")
    return [root for root in found if root is not None]
