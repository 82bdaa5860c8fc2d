"""Looks at the source of a target without importing it: a summary line, and what is plainly wrong.

Listings use it, so that `rlx plugins list` runs nobody's code.
"""

from __future__ import annotations

import ast
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

_LARGEST = 100_000
"""Bytes; parsing a larger file would be felt in a listing."""


def summary(target: str) -> str | None:
    """Return the first line of the docstring at `module:attr`; None when it takes an import."""
    module, _, attribute = target.partition(":")
    tree = _parsed(source_of(module))
    node: ast.AST | None = tree
    for name in attribute.split("."):
        node = _defined(node, name)
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return None
    text = ast.get_docstring(node)
    return text.strip().splitlines()[0] if text and text.strip() else None


def plain_problem(module: str) -> str | None:
    """Return why importing a module is bound to fail, as far as that shows without importing it."""
    if source_of(module) is None:
        return None if _spec(module) is not None else f"there is no module {module!r}"
    try:
        ast.parse(_read(source_of(module)) or "")
    except SyntaxError as error:
        return f"SyntaxError: {error.msg} (line {error.lineno})"
    return None


def source_of(module: str) -> Path | None:
    """Return the source file of a module, found as the import system would, without importing."""
    if module.endswith(".py"):
        return Path(module) if Path(module).is_file() else None
    spec = _spec(module)
    if spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)


def _spec(module: str) -> ModuleSpec | None:
    if module in sys.builtin_module_names:
        return ModuleSpec(module, None)
    path: list[str] | None = None
    spec: ModuleSpec | None = None
    name = ""
    for part in module.split("."):
        name = f"{name}.{part}" if name else part
        spec = PathFinder.find_spec(name, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return spec


def _parsed(path: Path | None) -> ast.Module | None:
    text = _read(path)
    if text is None:
        return None
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _read(path: Path | None) -> str | None:
    try:
        if path is None or path.stat().st_size > _LARGEST:
            return None
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _defined(node: ast.AST | None, name: str) -> ast.AST | None:
    for child in getattr(node, "body", []):
        if getattr(child, "name", None) == name:
            return child  # type: ignore[no-any-return]
    return None
