"""Import what a reference points at, and say where it comes from."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import operator
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from rlx.core.errors import UsageError, did_you_mean

FILE_PREFIX: Final = "rlx_file_"
_RLX: Final = Path(__file__).resolve().parent.parent


def import_target(
    target: str,
    *,
    label: str,
    where: str | None = None,
    search_path: Iterable[str] = (),
    source_hash: str | None = None,
) -> Any:
    """Return the object at `module:attr` or `/path/file.py:attr`.

    Raises `UsageError` with the full traceback when the module fails to import. `source_hash`
    identifies a file that a runtime environment put into another folder on this node.
    """
    extend_path(search_path)
    module_name, _, attribute = target.rpartition(":")
    try:
        with imported():
            module = import_place(module_name, source_hash)
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise UsageError(
            f"{label} could not be imported: {module_name} ended the interpreter with "
            f"SystemExit({error.code!r})",
            where=where,
            fix='move the module\'s script part under `if __name__ == "__main__":`',
        ) from error
    except BaseException as error:  # a module may raise anything, pytest.skip's for example
        raise _import_error(error, module_name, label, where) from error
    try:
        return operator.attrgetter(attribute)(module)
    except AttributeError as error:
        names = public_callables(module)
        raise UsageError(
            f"{label}: {module_name} has no attribute {attribute!r}",
            where=where,
            fix=did_you_mean(attribute, names)
            or (f"it defines: {', '.join(names)}" if names else "it defines nothing callable"),
        ) from error


@contextlib.contextmanager
def imported() -> Iterator[None]:
    """Keep what a plugin prints while it is imported out of the command's own output."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def import_place(place: str, source_hash: str | None = None) -> ModuleType:
    """Import a module by its name, or a file by its path; see `import_target`."""
    if place.endswith(".py"):
        return import_file(_locate(place, source_hash))
    return importlib.import_module(place)


def import_file(path: Path) -> ModuleType:
    """Import a file under a name of its own, so that it can neither shadow a library nor clash.

    The content is part of the name: an edited file is a new module in the same process.
    """
    path = path.resolve()
    content = path.read_bytes()
    digest = hashlib.sha256(str(path).encode() + b"\0" + content).hexdigest()[:12]
    name = f"{FILE_PREFIX}{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    extend_path([str(path.parent)])
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def extend_path(folders: Iterable[str]) -> None:
    """Append folders to `sys.path`; appended, they shadow nothing that is installed."""
    for folder in folders:
        if folder not in sys.path:
            sys.path.append(folder)


def public_callables(module: ModuleType) -> list[str]:
    """Return the names of functions and classes that a module itself defines."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
    ]


def source_files(obj: Any, target: str) -> list[Path]:
    """Return the files of the target's module and of the module that defines the object."""
    module_name, _, _ = target.rpartition(":")
    files: list[Path] = []
    if module_name.endswith(".py"):
        home = getattr(obj, "__module__", None) or type(obj).__module__
    else:
        home = module_name
    for name in (home, getattr(inspect.unwrap(obj), "__module__", None)):
        file = getattr(sys.modules.get(name or ""), "__file__", None)
        if file and Path(file).is_file() and Path(file).resolve() not in files:
            files.append(Path(file).resolve())
    return files


def top_level(module: ModuleType) -> Path | None:
    """Return the package folder or file of a top-level module; None for built-in ones."""
    for folder in getattr(module, "__path__", ()):
        return Path(folder).resolve()
    file = getattr(module, "__file__", None)
    return Path(file).resolve() if file else None


def search_root(module_name: str) -> str | None:
    """Return the folder that `sys.path` needs for a module that isn't installed, else None."""
    module = sys.modules.get(module_name.partition(".")[0])
    location = top_level(module) if module is not None else None
    return None if location is None or is_installed(location) else str(location.parent)


def is_installed(path: Path) -> bool:
    """Say whether a path belongs to site-packages, the standard library or rlx itself."""
    return any(path.is_relative_to(root) for root in _installed_roots())


def _installed_roots() -> list[Path]:
    names = ("purelib", "platlib", "stdlib", "platstdlib")
    folders = [sysconfig.get_path(name) for name in names]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    return [_RLX, *(Path(folder).resolve() for folder in folders)]


def _locate(path: str, source_hash: str | None) -> Path:
    """Find the file; on a node without the driver's folders, by name on `sys.path`."""
    if Path(path).is_file():
        return Path(path)
    for folder in sys.path if source_hash else ():
        candidate = Path(folder or ".") / Path(path).name
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"there is no file {path}")


def _import_error(
    error: BaseException, module_name: str, label: str, where: str | None
) -> UsageError:
    if isinstance(error, FileNotFoundError) and module_name in str(error):
        folder = Path(module_name).parent
        nearby = [item.name for item in folder.glob("*.py")] if folder.is_dir() else []
        return UsageError(
            f"{label}: there is no file {module_name}",
            where=where,
            fix=did_you_mean(Path(module_name).name, nearby) or "check the path",
        )
    missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
    if missing and (module_name == missing or module_name.startswith(f"{missing}.")):
        return UsageError(
            f"{label}: there is no module {missing!r}",
            where=where,
            fix="install the package that has it, or run in the folder where it lies; "
            "a file is given by its path: path/to/file.py:attr",
        )
    return UsageError(
        f"{label} could not be imported from {module_name}:\n\n{plugin_traceback(error)}",
        where=where,
        fix="the traceback above is the plugin's own",
    )


def plugin_traceback(error: BaseException, *, without: tuple[str, ...] = ()) -> str:
    """Format a traceback without the frames of the import system and of this module.

    Args:
        without: parts of paths whose frames are left out, too.
    """
    shown = traceback.TracebackException.from_exception(error)
    hidden = ("importlib", __file__, *without)
    kept = [frame for frame in shown.stack if not any(part in frame.filename for part in hidden)]
    shown.stack = traceback.StackSummary.from_list(kept)
    return "".join(shown.format()).rstrip()
