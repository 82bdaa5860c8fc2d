"""Large data files, read piece by piece into an Arrow file that is mapped: memory holds one piece.

The file has no name any more when this returns; its space is free again when the run ends.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LARGE = 32 << 20
"""Bytes from which on a file is worth the detour."""
MANY = 100_000
"""Rows from which on a parquet file is, however little room its compressed columns take."""
_PIECE = 4 << 20
_ROWS = 4096


def is_large(path: Path) -> bool:
    """Whether a file is worth the detour."""
    if path.stat().st_size >= LARGE:
        return True
    if path.suffix.lower() != ".parquet":
        return False
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return int(pq.read_metadata(str(path)).num_rows) >= MANY
    except (pa.ArrowInvalid, OSError):
        return False


def read_in_pieces(path: Path, text_columns: frozenset[str]) -> Any:
    """A table with what `read_file` would read; None where only the whole file tells the types.

    Each column has the type that the first piece gives it. Files of which a later piece has
    another one, lines that are longer than a piece, and what is wrong in any way, are left to
    others.
    """
    import pyarrow as pa

    opener = _OPENERS.get(path.suffix.lower())
    if opener is None:
        return None
    try:
        with opener(path, text_columns) as pieces:
            return _on_disk(pieces)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError):  # a full disk, too
        return None
    finally:
        pa.default_memory_pool().release_unused()


def _on_disk(pieces: Any) -> Any:
    import pyarrow as pa

    with tempfile.NamedTemporaryFile(prefix="rlx-data-", suffix=".arrow") as file:
        with pa.OSFile(file.name, "wb") as sink, pa.ipc.new_file(sink, pieces.schema) as writer:
            for piece in pieces:
                writer.write_batch(piece)
        return pa.ipc.open_file(pa.memory_map(file.name)).read_all()


@contextmanager
def _json_lines(path: Path, _text: frozenset[str]) -> Iterator[Any]:
    import pyarrow.json as pj

    def opened(schema: Any) -> Any:
        return pj.open_json(
            str(path),
            read_options=pj.ReadOptions(block_size=_PIECE),
            parse_options=pj.ParseOptions(explicit_schema=schema),
        )

    reader = opened(None)
    if (schema := dates_as_text(reader.schema)) is not None:
        reader = opened(schema)
    with reader:
        yield reader


@contextmanager
def _csv(path: Path, text: frozenset[str]) -> Iterator[Any]:
    import pyarrow as pa

    types = {name: pa.string() for name in text}
    reader = csv_reader(path, types, open_csv=True, block=_PIECE)
    if (schema := dates_as_text(reader.schema)) is not None:
        types |= changed_types(schema, reader.schema)
        reader = csv_reader(path, types, open_csv=True, block=_PIECE)
    with reader:
        yield reader


@contextmanager
def _parquet(path: Path, _text: frozenset[str]) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(str(path)) as file:
        batches = file.iter_batches(batch_size=_ROWS)
        yield pa.RecordBatchReader.from_batches(file.schema_arrow, batches)


def csv_reader(
    path: Path,
    types: dict[str, Any],
    *,
    block: int,
    open_csv: bool = False,
    threads: bool = True,
    bad: Callable[[Any], str] | None = None,
) -> Any:
    """A csv (or tsv) file as a table, or as a reader of its pieces.

    Args:
        types: of some columns; the others are inferred.
        open_csv: a reader, not the table.
        bad: is shown each row with another number of columns than the header.
    """
    import pyarrow.csv as pc

    return (pc.open_csv if open_csv else pc.read_csv)(
        str(path),
        read_options=pc.ReadOptions(use_threads=threads, block_size=block),
        parse_options=pc.ParseOptions(
            delimiter="\t" if path.suffix.lower() == ".tsv" else ",",
            newlines_in_values=True,
            invalid_row_handler=bad,
        ),
        convert_options=pc.ConvertOptions(
            column_types=types,
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def changed_types(new: Any, old: Any) -> dict[str, Any]:
    """The fields of a schema that differ from those of another one."""
    return {a.name: a.type for a, b in zip(new, old, strict=True) if not a.equals(b)}


def dates_as_text(schema: Any) -> Any:
    """Arrow takes ISO dates for timestamps, which loses how they were written: None if none are."""
    import pyarrow as pa

    fixed = pa.schema([field.with_type(_without_dates(field.type)) for field in schema])
    return None if fixed.equals(schema) else fixed


def _without_dates(kind: Any) -> Any:
    import pyarrow as pa

    if pa.types.is_temporal(kind):
        return pa.string()
    if pa.types.is_list(kind):
        return pa.list_(_without_dates(kind.value_type))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_dates(field.type)) for field in kind])
    return kind


_OPENERS: dict[str, Callable[[Path, frozenset[str]], Any]] = {
    ".jsonl": _json_lines,
    ".ndjson": _json_lines,
    ".csv": _csv,
    ".tsv": _csv,
    ".parquet": _parquet,
}
