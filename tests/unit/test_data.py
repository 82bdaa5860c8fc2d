"""Reading rows: every format, and one clear error for each way in which data can be wrong."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlx.core.config import DataConfig
from rlx.core.data import read_rows
from rlx.core.errors import UsageError

ROWS = [
    {"prompt": "1+1=", "label": "2", "level": 1},
    {"prompt": "a\nb, c", "label": "007", "level": 2},
    {"prompt": "ümlaut", "label": "2024-01-01", "level": 3},
]


def rows_of(path: Path | str, **settings: Any) -> list[dict[str, Any]]:
    rows, _ = read_rows(DataConfig(path=str(path), **settings))
    return [rows[index] for index in range(len(rows))]


def failure(path: Path | str, **settings: Any) -> str:
    with pytest.raises(UsageError) as caught:
        read_rows(DataConfig(path=str(path), **settings))
    return str(caught.value)


def write(path: Path, content: str | bytes) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_rows(folder: Path, suffix: str) -> Path:
    path = folder / f"train{suffix}"
    table = pa.Table.from_pylist(ROWS)
    if suffix == ".jsonl":
        write(path, "\n".join(json.dumps(row) for row in ROWS))
    elif suffix == ".json":
        write(path, json.dumps(ROWS, indent=1))
    elif suffix in (".csv", ".tsv"):
        import csv

        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, ROWS[0], delimiter="," if suffix == ".csv" else "\t")
            writer.writeheader()
            writer.writerows(ROWS)
    elif suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    assert rows_of(write_rows(tmp_path, suffix)) == ROWS


def test_the_source_is_the_short_name(tmp_path: Path) -> None:
    assert read_rows(DataConfig(path=str(write_rows(tmp_path, ".jsonl"))))[1] == "train"


def test_max_samples_takes_the_first_rows(tmp_path: Path) -> None:
    assert rows_of(write_rows(tmp_path, ".jsonl"), max_samples=2) == ROWS[:2]


def test_dates_in_json_and_csv_stay_as_written(tmp_path: Path) -> None:
    json_file = write(
        tmp_path / "a.jsonl", '{"label": "2024-01-01 00:00:00", "n": [{"d": "2024-01-01"}]}'
    )
    csv_file = write(tmp_path / "a.csv", "prompt,when\nx,2024-01-01 00:00:00\n")
    assert rows_of(json_file) == [{"label": "2024-01-01 00:00:00", "n": [{"d": "2024-01-01"}]}]
    assert rows_of(csv_file) == [{"prompt": "x", "when": "2024-01-01 00:00:00"}]


def test_an_empty_csv_cell_is_none(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.csv", "prompt,label\nx,\n")) == [
        {"prompt": "x", "label": None}
    ]


def test_a_line_longer_than_a_parsing_block_is_read(tmp_path: Path) -> None:
    long = "x" * (17 << 20)
    path = write(
        tmp_path / "a.jsonl", f'{{"prompt": "a"}}\n{{"prompt": "{long}"}}\n{{"prompt": "b"}}\n'
    )
    assert [len(row["prompt"]) for row in rows_of(path)] == [1, 17 << 20, 1]


def test_a_long_line_of_csv_is_read_too(tmp_path: Path) -> None:
    long = "x" * (17 << 20)
    path = write(tmp_path / "a.csv", f"prompt,when\na,2024-01-01\n{long},2024-01-02\nb,\n")
    rows = rows_of(path)
    assert [len(row["prompt"]) for row in rows] == [1, 17 << 20, 1]
    assert [row["when"] for row in rows] == ["2024-01-01", "2024-01-02", None]


def test_json_with_splits_gives_the_one_asked_for(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps({"train": ROWS[:1], "test": ROWS[1:]}))
    assert rows_of(path, split="test") == ROWS[1:]


def test_json_lines_in_a_json_file_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", "\n".join(json.dumps(row) for row in ROWS))
    assert rows_of(path) == ROWS


def test_a_byte_order_mark_is_no_content(tmp_path: Path) -> None:
    for name, text in [
        ("a.jsonl", '{"prompt": "x"}'),
        ("a.json", '[{"prompt": "x"}]'),
        ("a.csv", "prompt\nx\n"),
    ]:
        assert rows_of(write(tmp_path / name, b"\xef\xbb\xbf" + text.encode())) == [{"prompt": "x"}]


def test_saved_datasets_are_read_with_their_selection(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    dataset.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": dataset, "test": dataset.select([2, 0])}).save_to_disk(
        str(tmp_path / "two")
    )
    assert rows_of(tmp_path / "one") == ROWS
    assert rows_of(tmp_path / "two", split="test") == [ROWS[2], ROWS[0]]
    assert "did you mean 'train'?" in failure(tmp_path / "two", split="trian")


def test_a_folder_with_data_files_is_read_without_a_cache_at_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "cache"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", home)
    folder = tmp_path / "data"
    folder.mkdir()
    write_rows(folder, ".jsonl")
    assert rows_of(folder) == ROWS
    assert not home.exists()


def test_hub_names_go_through_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_dataset(name: str, configuration: str | None, *, split: str) -> Any:
        asked.append((name, configuration, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("rlx.core.hub.reachable", lambda url: True)
    rows, source = read_rows(DataConfig(path="openai/gsm8k:main", split="test"))
    assert (rows[0], source, asked) == (ROWS[0], "gsm8k", [("openai/gsm8k", "main", "test")])


def test_a_hub_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_args: Any, **_kwargs: Any) -> Any:
        raise FileNotFoundError("Dataset 'no/such' doesn't exist on the Hub\nlong story")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr("rlx.core.hub.reachable", lambda url: True)
    message = failure("no/such")
    assert "can't be loaded: Dataset 'no/such' doesn't exist on the Hub" in message
    assert "long story" not in message


def test_a_hub_that_is_not_there_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("rlx.core.hub.getproxies", dict)
    start = time.monotonic()
    assert "the hub can't be reached" in failure("nobody/has-this:main")
    assert time.monotonic() - start < 5
    assert "Retrying" not in capfd.readouterr().err
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_the_current_folder_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path, ".jsonl")
    monkeypatch.chdir(tmp_path)
    assert rows_of(".") == ROWS


def test_a_folder_of_several_formats_is_not_read_in_part(tmp_path: Path) -> None:
    write_rows(tmp_path, ".jsonl")
    write_rows(tmp_path, ".csv")
    assert "several formats: .csv, .jsonl" in failure(tmp_path)


LOADER = """
def load(split="train"): return [{"prompt": split, "label": 1}]
def counted(*, count, word="x"): return [{"prompt": word * (n + 1)} for n in range(count)]
def stream():
    for i in range(10**9): yield {"prompt": str(i)}
def frame():
    import pandas; return pandas.DataFrame({"prompt": ["x"], "n": [1]})
def table():
    import datasets; return datasets.Dataset.from_list([{"prompt": "x"}])
def splits(): return {"train": [{"prompt": "a"}], "test": [{"prompt": "b"}]}
def broken(): raise RuntimeError("no network")
def wrong(): return 3
def wrong_row(): return [{"prompt": "x"}, "y"]
value = 3
"""


def test_loader_functions_of_files_and_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "loader_for_test.py", LOADER)
    monkeypatch.chdir(tmp_path)
    assert rows_of(f"{file}:load", split="test") == [{"prompt": "test", "label": 1}]
    assert rows_of("loader_for_test:load") == [{"prompt": "train", "label": 1}]
    assert len(rows_of(f"{file}:stream", max_samples=3)) == 3
    assert rows_of(f"{file}:frame") == [{"prompt": "x", "n": 1}]
    assert rows_of(f"{file}:table") == [{"prompt": "x"}]
    assert rows_of(f"{file}:splits", split="test") == [{"prompt": "b"}]
    sys.modules.pop("loader_for_test")


def test_a_loader_is_given_its_parameters(tmp_path: Path) -> None:
    file = f"{write(tmp_path / 'loader.py', LOADER)}:counted"
    assert rows_of(file, params={"count": 2}) == [{"prompt": "x"}, {"prompt": "xx"}]
    assert rows_of(file, params={"count": 1, "word": "y"}) == [{"prompt": "y"}]
    assert "missing a required argument: 'count'" in failure(file)
    wrong = failure(file, params={"count": 1, "wrod": "y"})
    assert "did you mean 'word'?" in wrong


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("broken", "raised RuntimeError: no network"),
        ("wrong", "returned int"),
        ("wrong_row", "row 1 of the loader"),
        ("laod", "did you mean 'load'?"),
        ("value", "not a function"),
    ],
)
def test_loader_mistakes(tmp_path: Path, function: str, expected: str) -> None:
    file = write(tmp_path / "loader.py", LOADER)
    assert expected in failure(f"{file}:{function}")


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write_rows(tmp_path, ".jsonl")
    assert "did you mean 'train.jsonl'?" in failure(tmp_path / "trian.jsonl")
    assert "the folder has: train.jsonl" in failure(tmp_path / "quite_different.parquet")
    assert "nor does its folder" in failure(tmp_path / "nowhere" / "a.csv")


def test_a_folder_without_data_is_no_dataset(tmp_path: Path) -> None:
    assert "is no dataset" in failure(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", b"", "a.jsonl is empty"),
        ("a.jsonl", b"\n \n", "has no rows"),
        ("a.json", b" ", "a.json is empty"),
        ("a.json", b"[]", "has no rows"),
        ("a.csv", b"prompt,label\n", "has no rows"),
        ("a.csv", b"prompt,label\nx,1\nx,1,2\n", "row 3 of a.csv has 3 columns, the header 2"),
        ("a.jsonl", b'{"a": 1}\n{"a": }\n', "line 2 of a.jsonl is not JSON"),
        ("a.jsonl", b'{"a": 1}\n[1]\n', "line 2 of a.jsonl is a list, not an object"),
        ("a.jsonl", b'{"a": 1}\n\n{"a": "x"}\n', "mixed types: a number at first, text in line 3"),
        ("a.json", b'[{"a": 1},\n {"a" 2}]', "line 2 of a.json is not JSON"),
        ("a.json", b'[{"a": 1}, {"a": "x"}]', "mixed types: a number at first, text in row 1"),
        ("a.json", b'[{"a": 1}, 2]', "row 1 is a number, not an object"),
        ("a.json", b'"text"', "holds text, not a list of rows"),
        ("a.jsonl", b'{"a": "x"}\n{"a": "\xff"}\n', "line 2 of a.jsonl is not UTF-8 (byte 0xff)"),
        ("a.csv", b"prompt\nx\n\xe4\n", "line 3 of a.csv is not UTF-8"),
        ("a.jsonl", b'{"a": "\xc3', "line 1 of a.jsonl is not UTF-8"),
        ("a.parquet", b"no parquet", "is not a parquet file"),
        ("a.arrow", b"no arrow", "is not an arrow file"),
        ("a.xlsx", b"x", "no known data format"),
        ("a.csv", b"prompt,prompt\nx,y\n", "two columns of the name 'prompt'"),
        ("a.csv", b"d,d\n2024-01-01,2024-01-01\n", "two columns of the name 'd'"),
        ("a.jsonl", b'{"a": 1, "a": 2}\n', "specified twice"),
    ],
)
def test_each_defect_has_its_message(
    tmp_path: Path, name: str, content: bytes, expected: str
) -> None:
    assert expected in failure(write(tmp_path / name, content))


def test_an_invalid_byte_far_into_a_file_has_the_right_line(tmp_path: Path) -> None:
    lines = b'{"prompt": "\xc3\xa4bc"}\n' * 300_000
    assert "line 300001 of" in failure(write(tmp_path / "a.jsonl", lines + b'{"prompt": "\xff"}\n'))
