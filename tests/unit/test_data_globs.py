"""Compressed files and patterns of files give the same rows as one plain file."""

from __future__ import annotations

import bz2
import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rlx.core.config import DataConfig
from rlx.core.data import read_rows
from rlx.core.errors import UsageError

ROWS = [{"prompt": f"ü{i}", "label": i} for i in range(5)]
TEXT = "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


def read(path: Path | str, **settings: Any) -> tuple[list[dict[str, Any]], str]:
    rows, source = read_rows(DataConfig(path=str(path), **settings))
    return [rows[index] for index in range(len(rows))], source


def failure(path: Path | str) -> str:
    with pytest.raises(UsageError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("suffix", COMPRESS)
def test_compressed_lines_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"train.jsonl{suffix}"
    path.write_bytes(COMPRESS[suffix](TEXT))
    assert read(path) == (ROWS, "train")


def test_compressed_csv_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"prompt,label\nx,007\n"))
    assert read(tmp_path / "a.csv.gz")[0] == [{"prompt": "x", "label": "007"}]


def test_a_folder_of_compressed_files_is_read(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl.gz").write_bytes(gzip.compress(TEXT))
    assert read(tmp_path)[0] == ROWS


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "a.jsonl.gz is empty"),
        (b"not gzip", "a.jsonl.gz is no whole gzip file"),
        (gzip.compress(TEXT, mtime=0)[:-20], "a.jsonl.gz is no whole gzip file"),
        (gzip.compress(b"", mtime=0), "a.jsonl is empty"),
        (gzip.compress(b'{"a": 1}\n{"a": }', mtime=0), "a.jsonl.gz, line 2"),
        (gzip.compress(b'{"a": "\xff"}', mtime=0), "line 1 of a.jsonl is not UTF-8"),
    ],
)
def test_each_defect_names_the_compressed_file(
    tmp_path: Path, content: bytes, expected: str
) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(content)
    message = failure(path)
    assert expected in message
    assert str(path) in message


def test_a_pattern_reads_the_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, rows in (("train-2.jsonl", ROWS[3:]), ("train-1.jsonl", ROWS[:3])):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "test.jsonl").write_text('{"prompt": "no"}')
    assert read(tmp_path / "train-*.jsonl") == (ROWS, "train")
    assert read(tmp_path / "train-[12].jsonl", max_samples=4)[0] == ROWS[:4]


def test_a_pattern_without_a_stem_has_its_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "maths").mkdir()
    (tmp_path / "maths" / "a.jsonl").write_bytes(TEXT)
    monkeypatch.chdir(tmp_path)
    assert read("maths/*.jsonl") == (ROWS, "maths")
    assert read("**/*.jsonl")[1] == "data"


def test_a_column_that_one_file_lacks_is_none_there(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}')
    (tmp_path / "b.jsonl").write_text('{"prompt": "y", "label": 1}')
    assert [row["label"] for row in read(tmp_path / "*.jsonl")[0]] == [None, 1]


def test_files_with_other_types_do_not_fit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"label": 1}')
    (tmp_path / "b.jsonl").write_text('{"label": "x"}')
    message = failure(tmp_path / "*.jsonl")
    assert "b.jsonl does not fit the files before it" in message
    assert "label" in message


def test_a_pattern_that_nothing_fits(tmp_path: Path) -> None:
    assert "no file fits the pattern" in failure(tmp_path / "*.jsonl")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].jsonl").write_bytes(TEXT)
    assert read(tmp_path / "a[1].jsonl")[0] == ROWS
