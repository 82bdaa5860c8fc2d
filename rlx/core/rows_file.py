"""Rows into a file, JSON lines or Parquet, complete or not there at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from rlx.core.errors import UsageError

_CHUNK = 1024
Rows = Callable[[], Iterable[Mapping[str, Any]]]
"""Gives the rows from their beginning each time it is called."""


def write_rows(path: Path, rows: Rows) -> int:
    """Write `.jsonl` or `.parquet` by the path's ending, and return the number of rows.

    Raises UsageError when a column has values of types that Parquet can't hold in one column.
    """
    temporary = path.with_name(path.name + ".tmp")
    write = _write_parquet if path.suffix == ".parquet" else _write_jsonl
    try:
        count = write(temporary, rows)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    temporary.replace(path)
    return count


def _write_jsonl(path: Path, rows: Rows) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for row in rows():
            file.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Rows) -> int:
    """In two passes: a column may be empty in the first rows and have a type in later ones."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schema = pa.schema([])
        for table in _tables(rows()):
            schema = pa.unify_schemas([schema, table.schema], promote_options="permissive")
        count = 0
        with parquet.ParquetWriter(path, schema) as writer:
            for chunk in _chunks(rows()):
                writer.write_table(pa.Table.from_pylist(chunk, schema=schema))
                count += len(chunk)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UsageError(
            f"the rows can't be written as Parquet: {error}",
            where="generate.parquet",
            fix="JSON lines, which take mixed columns",
        ) from error
    return count


def _tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[Any]:
    import pyarrow as pa

    for chunk in _chunks(rows):
        yield pa.Table.from_pylist(chunk)


def _chunks(rows: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    waiting = iter(rows)
    while chunk := list(islice(waiting, _CHUNK)):
        yield chunk
