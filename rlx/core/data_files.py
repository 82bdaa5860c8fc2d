"""Data files as Arrow tables: json, jsonl, csv, tsv, parquet, arrow.

Arrow's readers parse a million rows in about a second. Where one of them gives up, the file is read
again in plain Python to say which line is at fault.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlx.core.data_pieces import (
    changed_types,
    csv_reader,
    dates_as_text,
    is_large,
    read_in_pieces,
)
from rlx.core.errors import UsageError

_BLOCK = 16 << 20  # bytes per parsing task, and the longest line that Arrow's JSON reader takes


def read_file(path: Path, *, text_columns: frozenset[str], split: str) -> Any:
    """Read one file as a `pyarrow.Table`.

    `text_columns` stay text in csv files, where every other column gets its type by inference.
    `split` picks the list in a json file that holds `{"train": [...], ...}`.
    Raises UsageError for an unknown format, an empty file, and content that belies the suffix.
    """
    suffix = path.suffix.lower()
    if suffix not in READERS:
        raise UsageError(
            f"{path.name} has no known data format",
            where=str(path),
            fix=f"one of {', '.join(sorted(READERS))}, or a loader: 'file.py:load'",
        )
    if path.stat().st_size == 0:
        raise UsageError(f"{path.name} is empty", where=str(path))
    if suffix in _TEXT:
        _check_utf8(path)
    if is_large(path) and (table := read_in_pieces(path, text_columns)) is not None:
        return table
    return READERS[suffix](path, text_columns, split)


def _read_jsonl(path: Path, _text: frozenset[str], _split: str) -> Any:
    import pyarrow as pa
    import pyarrow.json as pj

    size = path.stat().st_size
    block = _BLOCK
    schema = None
    while True:
        options = pj.ParseOptions(explicit_schema=schema)
        try:
            with pa.memory_map(str(path)) as file:
                table = pj.read_json(
                    file,
                    read_options=pj.ReadOptions(block_size=min(block, size + 1)),
                    parse_options=options,
                )
        except pa.ArrowInvalid as error:
            if "straddl" in str(error) and block < size:
                block *= 8
                continue
            raise _json_lines_error(path, str(error)) from None
        if schema is None and (schema := dates_as_text(table.schema)) is not None:
            continue
        return table


def _json_lines_error(path: Path, message: str) -> UsageError:
    """Find the line that Arrow stumbled over."""
    seen: dict[str, str] = {}
    for number, line in _lines(path):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            return UsageError(
                f"line {number} of {path.name} is not JSON: {error.msg} (column {error.colno})",
                where=where,
                fix="one JSON object per line",
            )
        if not isinstance(row, dict):
            return UsageError(
                f"line {number} of {path.name} is {_kind(row)}, not an object",
                where=where,
                fix='one JSON object per line: {"prompt": ..., "label": ...}',
            )
        for column, value in row.items():
            if value is not None and seen.setdefault(column, _kind(value)) != _kind(value):
                return UsageError(
                    f"column {column!r} has mixed types: {seen[column]} at first, "
                    f"{_kind(value)} in line {number}",
                    where=where,
                    fix="one type per column (numbers as text, for example)",
                )
    return UsageError(f"{path.name} can't be read: {message}", where=str(path))


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, line


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "true/false"
    names = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return names.get(type(value), "null")


def _read_json(path: Path, text: frozenset[str], split: str) -> Any:
    """A list of rows, an object with one list per split, or JSON lines under another name."""
    content = path.read_text(encoding="utf-8-sig")
    if not content.strip():
        raise UsageError(f"{path.name} is empty", where=str(path))
    try:
        value = json.loads(content)
    except json.JSONDecodeError as error:
        first = content.lstrip().splitlines()[0]
        if first.startswith("{") and _is_json(first):
            return _read_jsonl(path, text, split)
        raise UsageError(
            f"line {error.lineno} of {path.name} is not JSON: {error.msg} (column {error.colno})",
            where=f"{path}, line {error.lineno}",
        ) from None
    del content
    if isinstance(value, dict):
        value = value.get(split, value.get("data", [value]))
    if not isinstance(value, list):
        raise UsageError(
            f"{path.name} holds {_kind(value)}, not a list of rows",
            where=str(path),
            fix='[{"prompt": ..., "label": ...}, ...]',
        )
    return table_of(value, where=str(path))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


def table_of(rows: list[Any], *, where: str) -> Any:
    """Build a table from row dictionaries; raises UsageError that names row and column."""
    import pyarrow as pa

    columns: dict[str, list[Any]] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise UsageError(
                f"row {number} is {_kind(row)}, not an object (rows count from 0)", where=where
            )
        for name in row:
            columns.setdefault(name, [])
    arrays = {}
    for name in columns:
        values = [row.get(name) for row in rows]
        try:
            arrays[name] = pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
            raise _mixed_types(name, values, str(error), where) from None
    return pa.table(arrays)


def _mixed_types(name: str, values: list[Any], message: str, where: str) -> UsageError:
    first = ""
    for number, value in enumerate(values):
        if value is None:
            continue
        first = first or _kind(value)
        if _kind(value) != first:
            return UsageError(
                f"column {name!r} has mixed types: {first} at first, "
                f"{_kind(value)} in row {number} (rows count from 0)",
                where=where,
                fix="one type per column (numbers as text, for example)",
            )
    return UsageError(f"column {name!r} has mixed types: {message}", where=where)


def _read_csv(path: Path, text: frozenset[str], _split: str) -> Any:
    import pyarrow as pa

    bad: list[Any] = []
    block = _BLOCK

    def note(row: Any) -> str:
        bad.append(row)
        return "error"

    types = {name: pa.string() for name in text}
    while True:
        try:
            table = csv_reader(path, types, block=block, bad=note)
            if (schema := dates_as_text(table.schema)) is None:
                return table
            types |= changed_types(schema, table.schema)
        except pa.ArrowInvalid as error:
            message = str(error)
            if "straddl" not in message or block >= path.stat().st_size:
                break
            block *= 8
    bad.clear()
    try:  # one thread, because only then does the reader know the row's number
        csv_reader(path, types, block=block, bad=note, threads=False)
    except pa.ArrowInvalid as error:
        message = str(error)
    if bad:
        row = bad[0]
        raise UsageError(
            f"row {row.number} of {path.name} has {row.actual_columns} columns, "
            f"the header {row.expected_columns}",
            where=f"{path}, row {row.number}",
            fix='put values with commas or line breaks in quotes: "..."',
        )
    raise UsageError(f"{path.name} is not a csv file: {message}", where=str(path))


def _read_parquet(path: Path, _text: frozenset[str], _split: str) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(str(path), memory_map=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path.name} is not a parquet file: {error}", where=str(path)) from None


def _read_arrow(path: Path, _text: frozenset[str], _split: str) -> Any:
    import pyarrow as pa

    openers: tuple[Callable[[Any], Any], ...] = (pa.ipc.open_file, pa.ipc.open_stream)
    message = ""
    for opener in openers:
        try:
            return opener(pa.memory_map(str(path))).read_all()
        except (pa.ArrowInvalid, OSError) as error:
            message = str(error)
    raise UsageError(f"{path.name} is not an arrow file: {message}", where=str(path))


def _check_utf8(path: Path) -> None:
    decoder = codecs.getincrementaldecoder("utf-8")()
    with path.open("rb") as file:
        line = 1
        while True:
            chunk = file.read(4 << 20)
            try:
                decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object[: error.start].count(b"\n")
                raise UsageError(
                    f"line {line} of {path.name} is not UTF-8 "
                    f"(byte 0x{error.object[error.start]:02x})",
                    where=f"{path}, line {line}",
                    fix="save the file as UTF-8",
                ) from None
            if not chunk:
                return
            line += chunk.count(b"\n")


_TEXT = frozenset({".json", ".jsonl", ".ndjson", ".csv", ".tsv"})
READERS: dict[str, Callable[[Path, frozenset[str], str], Any]] = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
    ".arrow": _read_arrow,
}
