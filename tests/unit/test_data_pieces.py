"""Large files are read in pieces, to the same rows; what pieces can't tell is read as a whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlx.core import data_pieces
from rlx.core.config import DataConfig
from rlx.core.data import read_rows
from rlx.core.errors import UsageError

ROWS = [
    {"prompt": f"a\n{i}, b", "label": f"00{i}", "when": "2024-01-01", "n": i} for i in range(3000)
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_pieces, "LARGE", 0)
    monkeypatch.setattr(data_pieces, "_PIECE", 1 << 14)
    monkeypatch.setattr(data_pieces, "_ROWS", 100)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows, _ = read_rows(DataConfig(path=str(path)))
    return [rows[i] for i in range(len(rows))]


def in_pieces(path: Path) -> Any:
    return data_pieces.read_in_pieces(path, frozenset({"prompt", "label"}))


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", ROWS)
    assert in_pieces(path).column("prompt").num_chunks > 3
    assert rows_of(path) == ROWS


def test_many_rows_are_large_however_well_they_compress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_pieces, "LARGE", 1 << 40)
    path = write(tmp_path / "a.parquet", ROWS)
    assert not data_pieces.is_large(path)
    monkeypatch.setattr(data_pieces, "MANY", 3000)
    assert data_pieces.is_large(path)


def test_nothing_is_left_in_the_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    table = in_pieces(write(tmp_path / "a.jsonl", ROWS))
    assert list((tmp_path / "tmp").iterdir()) == []
    assert table.slice(2999, 1).to_pylist() == [ROWS[2999]]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_types_that_only_a_later_piece_tells(tmp_path: Path, suffix: str) -> None:
    rows = [{**row, "n": None if i < 2500 else 1.5} for i, row in enumerate(ROWS)]
    path = write(tmp_path / f"a{suffix}", rows)
    assert in_pieces(path) is None
    assert rows_of(path) == rows


def test_a_column_that_only_a_later_piece_has(tmp_path: Path) -> None:
    rows = [{**row, **({"more": 1} if i > 2500 else {})} for i, row in enumerate(ROWS)]
    assert rows_of(write(tmp_path / "a.jsonl", rows)) == [{"more": None, **row} for row in rows]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_line_longer_than_a_piece(tmp_path: Path, suffix: str) -> None:
    rows = [*ROWS, {**ROWS[0], "prompt": "x" * (1 << 16)}]
    assert rows_of(write(tmp_path / f"a{suffix}", rows)) == rows


def test_mistakes_have_the_message_of_a_small_file(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROWS)
    with path.open("a") as file:
        file.write('{"prompt": 3, "label": "x"}\n')
    with pytest.raises(UsageError, match="mixed types: text at first, a number in line 3001"):
        rows_of(path)


def test_a_full_disk_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data_pieces, "_on_disk", full)
    assert rows_of(write(tmp_path / "a.jsonl", ROWS)) == ROWS
