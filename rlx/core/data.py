"""Where rows come from: a file, a folder, a hub name or a loader function, all as one `Rows`."""

from __future__ import annotations

import inspect
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

from rlx.core.config import DataConfig
from rlx.core.data_globs import (
    inner_name,
    is_data_file,
    is_pattern,
    read_any_file,
    read_pattern,
    source_of_pattern,
)
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.hub import hub_or_cache
from rlx.core.importing import import_target

EMBEDDED = "rlx.embedded.task:load"


class Rows(Protocol):
    """Rows by number."""

    @property
    def columns(self) -> Sequence[str]: ...

    def __len__(self) -> int: ...

    def __getitem__(self, row: int) -> dict[str, Any]: ...

    def values(self, column: str) -> Iterator[Any]:
        """The column's values in order, as Python objects."""
        ...

    def first_missing(self, column: str) -> int | None:
        """The first row whose value is absent, None or NaN."""
        ...


@dataclass(frozen=True, slots=True)
class ArrowRows:
    """Rows of a `pyarrow.Table`; one row becomes Python objects when it is asked for."""

    table: Any

    @property
    def columns(self) -> Sequence[str]:
        return list(self.table.column_names)

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self.table.slice(row, 1).to_pylist()[0])

    def values(self, column: str) -> Iterator[Any]:
        for batch in self.table.select([column]).to_batches(max_chunksize=4096):
            yield from batch.column(0).to_pylist()

    def first_missing(self, column: str) -> int | None:
        import pyarrow.compute as pc

        values = self.table.column(column)
        row = pc.index(pc.is_null(values, nan_is_null=True), True).as_py()
        return None if row < 0 else int(row)


@dataclass(frozen=True, slots=True)
class ListRows:
    """Rows that a loader function made; any Python objects."""

    rows: Sequence[Mapping[str, Any]]

    @property
    def columns(self) -> Sequence[str]:
        return list(self.rows[0]) if self.rows else []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, Any]:
        return dict(self.rows[row])

    def values(self, column: str) -> Iterator[Any]:
        return (row.get(column) for row in self.rows)

    def first_missing(self, column: str) -> int | None:
        for number, value in enumerate(self.values(column)):
            if value is None or (isinstance(value, float) and value != value):
                return number
        return None


def read_rows(config: DataConfig) -> tuple[Rows, str]:
    """Return the rows that `config.path` names, the first `max_samples` of them, and their source.

    The source is the short name that task ids and metrics carry: a file's stem, a folder's or hub
    repository's name. Raises UsageError when nothing is there, or not a row of it is readable.
    """
    path = config.path
    local = Path(path).expanduser()
    text = frozenset(name for name in (config.prompt, config.label) if name)
    if path == "embedded":
        rows, source = _from_loader(EMBEDDED, config), "embedded"
    elif local.is_dir():
        rows, source = _from_folder(local, config), local.resolve().name
    elif local.is_file():
        table = read_any_file(local, text_columns=text, split=config.split)
        rows, source = ArrowRows(table), inner_name(local).stem
    elif is_pattern(path):
        table = read_pattern(path, text_columns=text, split=config.split)
        rows, source = ArrowRows(table), source_of_pattern(path)
    elif _is_loader(path):
        module, _, function = path.rpartition(":")
        rows, source = _from_loader(path, config), Path(module).stem + "." + function
    elif _looks_local(path):
        raise _missing_file(local)
    else:
        rows, source = _from_hub(path, config), path.partition(":")[0].rsplit("/", 1)[-1]
    if len(rows) == 0:
        raise UsageError(f"data {path!r} has no rows", where="data.path")
    if twice := [name for name, count in Counter(rows.columns).items() if count > 1]:
        raise UsageError(
            f"data {path!r} has two columns of the name {twice[0]!r}",
            where="data.path",
            fix="rename or delete one of them",
        )
    if config.max_samples is not None and config.max_samples < len(rows):
        rows = _first(rows, config.max_samples)
    return rows, source


def _first(rows: Rows, count: int) -> Rows:
    if isinstance(rows, ArrowRows):
        return ArrowRows(rows.table.slice(0, count))
    return ListRows([rows[index] for index in range(count)])


def _looks_local(path: str) -> bool:
    if is_data_file(Path(path)) or path.startswith((".", "/", "~")):
        return True
    return path.count("/") > 1 or ("/" in path and Path(path).parent.is_dir())


def _missing_file(path: Path) -> UsageError:
    folder = path.parent
    if not folder.is_dir():
        return UsageError(
            f"data file {str(path)!r} does not exist, nor does its folder", where="data.path"
        )
    names = [entry.name for entry in islice(folder.iterdir(), 10_000)]
    data = sorted(name for name in names if is_data_file(Path(name)))
    listing = f"the folder has: {', '.join(data[:8])}" if data else "no data file is in its folder"
    return UsageError(
        f"data file {str(path)!r} does not exist",
        where="data.path",
        fix=did_you_mean(path.name, names) or listing,
    )


# ---------------------------------------------------------------------------------- loaders


def _is_loader(path: str) -> bool:
    module, colon, function = path.rpartition(":")
    if not colon or not function.isidentifier():
        return False
    return module.endswith(".py") or all(part.isidentifier() for part in module.split("."))


def _from_loader(path: str, config: DataConfig) -> Rows:
    """Call `file.py:load` or `pkg.mod:load`; `split` is passed when the function takes it."""
    function = import_target(
        path, label=f"data loader {path!r}", where="data.path", search_path=[str(Path.cwd())]
    )
    if not callable(function):
        raise UsageError(
            f"data loader {path!r} is {type(function).__name__}, not a function",
            where="data.path",
            fix="a function that returns rows",
        )
    try:
        result = function(**_arguments(function, path, config))
    except KeyError as error:
        raise UsageError(
            f"the loader {path!r} raised KeyError: {error} (split {config.split!r})",
            where="data.path",
            fix="check data.split",
        ) from error
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"the loader {path!r} raised {type(error).__name__}: {error}", where="data.path"
        ) from error
    return _rows_of(result, path, config)


def _arguments(function: Callable[..., Any], path: str, config: DataConfig) -> dict[str, Any]:
    """`data.params`, and the split where the function takes one."""
    signature = inspect.signature(function)
    given = dict(config.params)
    if "split" in signature.parameters:
        given.setdefault("split", config.split)
    try:
        signature.bind(**given)
    except TypeError as error:
        names = [name for name in signature.parameters if name != "split"]
        unknown = next((name for name in given if name not in signature.parameters), "")
        raise UsageError(
            f"the loader {path!r} can't be called with data.params: {error}",
            where="data.params",
            fix=did_you_mean(unknown, names) or f"it takes: {', '.join(names) or 'nothing'}",
        ) from None
    return given


def _rows_of(result: Any, path: str, config: DataConfig) -> Rows:
    """Accept what loaders return: a dataset, a table, a data frame, any iterable of mappings."""
    if isinstance(result, Mapping):
        result = _pick_split(result, config.split, path)
    if hasattr(result, "with_format"):
        return _dataset_rows(result)
    if hasattr(result, "to_batches") and hasattr(result, "num_rows"):
        return ArrowRows(result)
    if hasattr(result, "to_dict") and hasattr(result, "columns"):
        return ListRows(result.to_dict("records"))
    if isinstance(result, (str, bytes)) or not isinstance(result, Iterable):
        raise UsageError(
            f"the loader {path!r} returned {type(result).__name__}",
            where="data.path",
            fix='return rows: a list of dictionaries such as {"prompt": ..., "label": ...}',
        )
    rows = list(islice(result, config.max_samples))
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UsageError(
                f"row {number} of the loader {path!r} is {type(row).__name__}, not a mapping",
                where="data.path",
                fix='return rows: a list of dictionaries such as {"prompt": ..., "label": ...}',
            )
    return ListRows(rows)


def _pick_split(splits: Mapping[str, Any], split: str, path: str) -> Any:
    if split not in splits:
        raise UsageError(
            f"data {path!r} has no split {split!r}",
            where="data.split",
            fix=did_you_mean(split, splits) or f"one of: {', '.join(map(str, splits))}",
        )
    return splits[split]


# ------------------------------------------------------------------------ folders and the hub


def _dataset_rows(dataset: Any) -> Rows:
    """A `datasets.Dataset` as its Arrow table: memory-mapped, images and audio not decoded."""
    return ArrowRows(dataset.with_format("arrow")[:])


def _from_folder(folder: Path, config: DataConfig) -> Rows:
    names = {entry.name for entry in folder.iterdir()}
    if names & {"dataset_dict.json", "state.json"}:
        with _quiet_datasets() as datasets:
            loaded = _guarded(lambda: datasets.load_from_disk(str(folder)), folder)
        if isinstance(loaded, Mapping):
            loaded = _pick_split(loaded, config.split, str(folder))
        return _dataset_rows(loaded)
    files = [p for p in folder.rglob("*") if is_data_file(p)]
    if not files:
        raise UsageError(
            f"the folder {str(folder)!r} is no dataset: it holds no data file",
            where="data.path",
            fix="a file, a folder written by Dataset.save_to_disk, or a folder with data files",
        )
    kinds = sorted({inner_name(file).suffix.lower() for file in files})
    if len(kinds) > 1 and not set(kinds) <= {".json", ".jsonl"}:
        # `datasets` would take the most frequent one, and say nothing of the rest
        raise UsageError(
            f"the folder {str(folder)!r} has data of several formats: {', '.join(kinds)}",
            where="data.path",
            fix=f"one of them by a pattern: {str(folder / '*')!r}".replace("*'", f"*{kinds[0]}'"),
        )
    with tempfile.TemporaryDirectory(prefix="rlx-data-") as cache, _quiet_datasets() as datasets:
        # in memory, because the cache is gone when this returns
        load = {"split": config.split, "cache_dir": cache, "keep_in_memory": True}
        # resolved, because `.` has no name
        dataset = _guarded(lambda: datasets.load_dataset(str(folder.resolve()), **load), folder)
        return _dataset_rows(dataset)


def _from_hub(path: str, config: DataConfig) -> Rows:
    """`owner/name` or `owner/name:configuration`, in the hub's usual cache."""
    name, _, configuration = path.partition(":")
    with _quiet_datasets() as datasets, hub_or_cache() as hub:
        dataset = _guarded(
            lambda: datasets.load_dataset(name, configuration or None, split=config.split),
            path,
            what=None
            if hub
            else "it is no file or folder, the hub can't be reached (or "
            "HF_HUB_OFFLINE is set), and its cache doesn't have it",
        )
    return _dataset_rows(dataset)


def _guarded(load: Callable[[], Any], path: Path | str, *, what: str | None = None) -> Any:
    """Run a `datasets` call; its errors become one sentence (the cause stays in the traceback).

    `what` is said in place of what `datasets` says.
    """
    try:
        return load()
    except Exception as error:
        cause = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        first = what or (str(cause).strip() or type(cause).__name__).splitlines()[0]
        if what is None and "split" in first.lower():
            raise UsageError(f"data {str(path)!r}: {first}", where="data.split") from error
        fix = None
        if isinstance(path, str):
            near = did_you_mean(path, ["embedded", *(entry.name for entry in Path.cwd().iterdir())])
            fix = near or "a file or folder that exists, a hub name 'owner/name', or 'pkg.mod:load'"
        raise UsageError(
            f"data {str(path)!r} can't be loaded: {first}", where="data.path", fix=fix
        ) from error


@contextmanager
def _quiet_datasets() -> Iterator[Any]:
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield datasets
    finally:
        if shown:
            datasets.enable_progress_bars()
