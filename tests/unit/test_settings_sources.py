"""Lists of data sources in the settings: whole, by entry, from YAML and back, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlx.core.config import DataConfig, SourceConfig
from rlx.core.errors import UsageError
from rlx.core.settings import Settings, dump_yaml, load_settings

YAML = """
data:
  label: answer
  sources:
    - path: a.jsonl
      probability: 0.75
    - path: b.jsonl
      probability: 0.25
      label: null
eval:
  sources: [test.jsonl]
"""


def settings(folder: Path, *sets: str, **flags: Any) -> Settings:
    path = folder / "run.yaml"
    path.write_text(YAML)
    return load_settings(files=[path], sets=sets, flags=flags, env={})


def test_what_a_source_leaves_out_it_takes_from_the_data_section(tmp_path: Path) -> None:
    data = settings(tmp_path).config.data
    first, second = (data.of(source) for source in data.sources)
    assert (first.path, first.label, first.sources) == ("a.jsonl", "answer", [])
    assert (second.path, second.label) == ("b.jsonl", None)


def test_a_written_configuration_reads_back_to_the_same(tmp_path: Path) -> None:
    config = settings(tmp_path).config
    (tmp_path / "again.yaml").write_text(dump_yaml(config))
    again = load_settings(files=[tmp_path / "again.yaml"], env={}).config
    assert again == config
    assert [s.model_fields_set for s in again.data.sources] == [
        s.model_fields_set for s in config.data.sources
    ]


def test_one_key_of_one_entry_can_be_set(tmp_path: Path) -> None:
    found = settings(tmp_path, "data.sources.1.max_samples=5")
    assert found.config.data.sources[1].max_samples == 5
    assert found.config.data.sources[1].path == "b.jsonl"
    assert found.origin("data.sources.1.max_samples") == "--set data.sources.1.max_samples"
    assert found.origin("data.sources.0.path") == f"{tmp_path}/run.yaml:5"


def test_a_flag_replaces_the_whole_list(tmp_path: Path) -> None:
    found = settings(tmp_path, eval_data=["x.jsonl", "y.jsonl"])
    assert [source.path for source in found.config.eval.sources] == ["x.jsonl", "y.jsonl"]


def test_a_text_is_a_path(tmp_path: Path) -> None:
    assert DataConfig(sources="a.jsonl").sources == [SourceConfig(path="a.jsonl")]  # type: ignore[arg-type]
    assert settings(tmp_path, "eval.sources=[]").config.eval.sources == []


def test_the_embedded_recipe_is_for_the_embedded_data_only() -> None:
    found = load_settings(sets=["data.sources=[a.jsonl]"], env={})
    assert "embedded recipe" not in {
        origin for key, origin in found.origins.items() if key.startswith(("data.", "eval."))
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data.sources=[{pth: a}]", "data.sources.0.pth"),
        ("data.sources=[{pth: a}]", "did you mean 'path'?"),
        ("data.sources=[3]", "is a mapping of settings; got 3"),
        ("data.sources.2.path=x", "no such entry; data.sources has 2, counted from 0"),
        ("data.sources.0.probability=2", "a number > 0 and ≤ 1"),
        ("data.sources.0=x", "no such setting"),
        ("data.sources=[{name: a}]", "data.sources.0.path"),
    ],
)
def test_each_mistake_has_its_message(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings(tmp_path, text)
    assert expected in str(caught.value)
