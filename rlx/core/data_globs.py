"""Data files by pattern, and compressed ones: both end up as one Arrow table."""

from __future__ import annotations

import glob
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlx.core.data_files import READERS, read_file
from rlx.core.errors import UsageError

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def is_data_file(path: Path) -> bool:
    """Whether the name says so: `a.jsonl`, `a.csv.gz`."""
    return inner_name(path).suffix.lower() in READERS


def inner_name(path: Path) -> Path:
    """The path without the suffix of its compression."""
    return path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path


def is_pattern(path: str) -> bool:
    """Whether `path` stands for several files."""
    return glob.has_magic(path) and not Path(path).expanduser().exists()


def source_of_pattern(path: str) -> str:
    """A short name: `data/train-*.jsonl` → `train`, `data/*.jsonl` → `data`."""
    stem = re.sub(r"[*?\[].*", "", inner_name(Path(path)).name).strip("-_. ")
    parents = [part for part in Path(path).parent.parts if not glob.has_magic(part)]
    return stem or (parents[-1] if parents else "data")


def read_any_file(path: Path, *, text_columns: frozenset[str], split: str) -> Any:
    """Like `read_file`, for compressed files too."""
    if inner_name(path) == path:
        return read_file(path, text_columns=text_columns, split=split)
    with _decompressed(path) as plain:
        try:
            return read_file(plain, text_columns=text_columns, split=split)
        except UsageError as error:
            where = (error.where or "").replace(str(plain), str(path))
            raise UsageError(error.what, where=where or str(path), fix=error.fix) from None


def read_pattern(path: str, *, text_columns: frozenset[str], split: str) -> Any:
    """Read every file that fits, in the order of their names, as one table."""
    import pyarrow as pa

    pattern = Path(path).expanduser()
    found = Path(pattern.anchor).glob(str(pattern.relative_to(pattern.anchor)))
    files = sorted(file for file in found if file.is_file())
    if not files:
        raise UsageError(f"no file fits the pattern {path!r}", where="data.path")
    tables = [read_any_file(file, text_columns=text_columns, split=split) for file in files]
    whole = tables[0]
    for file, table in zip(files[1:], tables[1:], strict=True):
        try:
            whole = pa.concat_tables([whole, table], promote_options="default")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise UsageError(
                f"{file.name} does not fit the files before it: {error}",
                where=str(file),
                fix="the same columns with the same types in every file",
            ) from None
    return whole


@contextmanager
def _decompressed(path: Path) -> Iterator[Path]:
    """The content in a temporary file, which is gone when the context ends."""
    import pyarrow as pa

    kind = COMPRESSIONS[path.suffix.lower()]
    with tempfile.TemporaryDirectory(prefix="rlx-data-") as folder:
        plain = Path(folder) / inner_name(path).name
        if path.stat().st_size == 0:
            raise UsageError(f"{path.name} is empty", where=str(path))
        try:
            with pa.input_stream(str(path), compression=kind) as source, plain.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 22)
        except OSError as error:
            raise UsageError(
                f"{path.name} is no whole {kind} file: {error}", where=str(path)
            ) from None
        yield plain
