"""Which files and packages of the driver other nodes need, so that references resolve there."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlx.core.importing import FILE_PREFIX, is_installed, top_level
from rlx.core.registry import BUILTIN

if TYPE_CHECKING:
    from rlx.core.references import ComponentRef
    from rlx.core.worker_hooks import HookRef


def shipped_modules(refs: Iterable[ComponentRef | HookRef]) -> list[Path]:
    """Return files and package folders that other nodes can't have, for Ray's `py_modules`.

    These are the references' targets and what they import, also inside of functions, as far as it
    lies below the references' search paths and in no `site-packages`; and the packages of installed
    plugins, without what they depend on.
    """
    refs = list(refs)
    roots = [Path(folder).resolve() for ref in refs for folder in ref.search_path]
    waiting: list[Path] = []
    for ref in refs:
        place = ref.target.rpartition(":")[0]
        if ref.payload is not None:
            waiting += _loaded(roots)  # a pickled object names its modules only inside the pickle
        elif place.endswith(".py"):
            waiting.append(Path(place))
        elif (found := _below(roots, place.partition(".")[0]) or _of_plugin(ref)) is not None:
            waiting.append(found)
    shipped: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path not in shipped:
            shipped.add(path)
            candidates = (_below(roots, name) for name in _imports(path))
            waiting += [found for found in candidates if found is not None]
    return sorted(shipped)


def _of_plugin(ref: ComponentRef | HookRef) -> Path | None:
    """Return where a plugin that is installed here lies: other nodes need not have it."""
    if ref.distribution in (None, BUILTIN):
        return None
    module = sys.modules.get(ref.target.partition(":")[0].partition(".")[0])
    return None if module is None else top_level(module)


def _below(roots: list[Path], module: str) -> Path | None:
    """Return the file or folder of a top-level module below one of the roots."""
    for root in roots:
        for path in (root / module, root / f"{module}.py"):
            is_package = path.is_dir() and any(path.glob("*.py"))
            if (is_package or path.is_file()) and not is_installed(path):
                return path
    return None


def _imports(path: Path) -> Iterator[str]:
    """Yield the top-level modules that a file, or any file of a package, imports absolutely."""
    for file in path.rglob("*.py") if path.is_dir() else (path,):
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (OSError, SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield node.module.partition(".")[0]


def _loaded(roots: list[Path]) -> list[Path]:
    """Return the top-level modules below the roots that this process has imported."""
    found = []
    for name, module in list(sys.modules.items()):
        if name == "__main__" or name.startswith(FILE_PREFIX) or "." in name:
            continue
        location = top_level(module)
        if location is not None and location.parent in roots and not is_installed(location):
            found.append(location)
    return found
