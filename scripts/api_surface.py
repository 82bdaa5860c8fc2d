"""The public surface of rlx as data: what a plugin may import, with signatures and docs.

`api_page.py` makes the reference of it. tests/contract/public_api.txt holds what was promised: new
lines are added by `make docs`, a line that changes or goes is taken out by hand, together with a
new `API_VERSION` and a sentence in `rlx.core.api.CHANGES`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

import rlx
import rlx.testing
from rlx.core.component import KINDS, REQUIREMENTS, Tags
from rlx.core.discovery import COMMAND_GROUP, HOOK_GROUP
from rlx.core.hookspecs import HOOKS

PAGE = Path(__file__).resolve().parent.parent / "tests" / "contract" / "public_api.txt"
_INHERITED = ("rlx.core.", "rlx.testing.")
"""Members of bases in these modules count; those of object, Exception, pydantic don't."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A field, property or method of a public class."""

    name: str
    signature: str
    """`: Tensor` or `(values: Tensor) -> Tensor`."""
    doc: str = ""

    def __str__(self) -> str:
        return f"{self.name}{self.signature}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A public name."""

    name: str
    """With its module: `rlx.resolve`."""
    signature: str
    doc: str = ""
    members: list[Member] = field(default_factory=list)


def items(module: Any) -> list[Item]:
    """Return the public names of `rlx` or `rlx.testing`, in the order of `__all__`."""
    names = [name for name in module.__all__ if not name.startswith("__")]
    return [_item(f"{module.__name__}.{name}", getattr(module, name)) for name in names]


def render() -> str:
    """Return what was promised and what is new, one promise a line."""
    promised = PAGE.read_text(encoding="utf-8").splitlines() if PAGE.is_file() else []
    return "".join(f"{line}\n" for line in sorted({*promised, *lines()}))


def lines() -> Iterator[str]:
    """Yield the whole surface. Of values that only rlx makes the fields count, not how it does."""
    for module in (rlx, rlx.testing):
        for item in items(module):
            made_by_rlx = item.members and item.signature.startswith("(*")
            yield item.name if made_by_rlx else f"{item.name}{item.signature}"
            yield from (f"{item.name}.{member}" for member in item.members)
    for name, info in HOOKS.items():
        arguments = ", ".join(inspect.signature(_spec(name)).parameters)
        yield f"hook {name}({arguments}) {info.mode}, {info.process}"
    for group in (HOOK_GROUP, COMMAND_GROUP, *(f"rlx.{kind}" for kind in KINDS)):
        yield f"entry points {group}"
    for requirement in sorted(REQUIREMENTS):
        yield f"requires {requirement}"
    for tag in dataclasses.fields(Tags):
        yield f"tag {tag.name}"


def _spec(name: str) -> Any:
    from rlx.core import hookspecs

    return getattr(hookspecs, name)


def _item(name: str, value: Any) -> Item:
    if not inspect.isclass(value):
        if not callable(value):
            return Item(name=name, signature=f": {type(value).__name__}")
        doc = inspect.getdoc(value) or ""
        return Item(name=name, signature=_signature(value), doc=doc)
    if not value.__module__.startswith("rlx."):
        return Item(name=name, signature="", doc=f"`{value.__module__}.{value.__qualname__}`.")
    written = "__init__" in vars(value)
    doc = inspect.cleandoc(value.__doc__ or "") if value.__doc__ else ""
    if doc.startswith(f"{value.__name__}("):  # what dataclass writes where there is none
        doc = ""
    return Item(
        name=name,
        signature=_signature(value) if written else "",
        doc=doc,
        members=list(_members(value)),
    )


def _members(value: type) -> Iterator[Member]:
    fields, docs = _fields(value), _attribute_docs(value)
    for name, text in fields.items():
        yield Member(name=name, signature=f": {text}", doc=docs.get(name, ""))
    seen = {*fields}
    for base in value.__mro__:
        if not base.__module__.startswith(_INHERITED):
            continue
        for name, attribute in vars(base).items():
            if name.startswith("_") or name in seen:
                continue
            member = _member(name, attribute)
            if member is not None:
                seen.add(name)
                yield member


def _fields(value: type) -> dict[str, str]:
    if issubclass(value, BaseModel):
        raw = inspect.get_annotations(value)
        return {name: str(raw.get(name, "")) for name in value.model_fields}
    if dataclasses.is_dataclass(value):
        return {item.name: str(item.type) for item in dataclasses.fields(value)}
    return {}


def _member(name: str, attribute: Any) -> Member | None:
    getter = getattr(attribute, "fget", None) or getattr(attribute, "func", None)
    if getter is not None:  # property, cached_property
        answer = inspect.signature(getter).return_annotation
        return Member(name=name, signature=f": {answer}", doc=inspect.getdoc(getter) or "")
    function = getattr(attribute, "__func__", attribute)
    if not inspect.isfunction(function):
        return None
    signature = _signature(function, skip=0 if isinstance(attribute, staticmethod) else 1)
    return Member(name=name, signature=signature, doc=inspect.getdoc(function) or "")


class _Bare:
    """An annotation that is shown as it was written, without the quotes of a string."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _signature(value: Any, *, skip: int = 0) -> str:
    signature = inspect.signature(value)
    answer = signature.return_annotation
    parameters = [
        parameter.replace(annotation=_bare(parameter.annotation))
        for parameter in list(signature.parameters.values())[skip:]
    ]
    signature = signature.replace(
        parameters=parameters,
        return_annotation=inspect.Signature.empty if inspect.isclass(value) else _bare(answer),
    )
    return re.sub(r" at 0x[0-9a-f]+", "", str(signature)).replace("<factory>", "…")


def _bare(annotation: Any) -> Any:
    return _Bare(annotation) if isinstance(annotation, str) else annotation


def _attribute_docs(value: type) -> dict[str, str]:
    """Return the texts that stand below the fields in the source, by field."""
    found: dict[str, str] = {}
    for base in reversed(value.__mro__):
        module = sys.modules.get(base.__module__)
        if module is None or not base.__module__.startswith("rlx."):
            continue
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(node, ast.ClassDef)
        for before, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(before, ast.AnnAssign)
                and isinstance(before.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[before.target.id] = inspect.cleandoc(str(after.value.value))
    return found
