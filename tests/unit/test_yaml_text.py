"""YAML 1.2 scalars, line numbers, and a writer that the reader takes back."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rlx.core.errors import UsageError
from rlx.core.yaml_text import dump_tree, dump_value, parse_file, parse_value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("-1.5E3", -1500.0),
        ("7", 7),
        ("0x10", 16),
        ("true", True),
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("010", "010"),
        ("1_000", "1_000"),
        ("2020-01-01", "2020-01-01"),
        ("null", None),
        ("", None),
        ("[math, overlong:0.5]", ["math", "overlong:0.5"]),
        ("{a: 1e-3}", {"a": 1e-3}),
        ("{prompt}: x", "{prompt}: x"),
    ],
)
def test_scalars_are_read_as_in_yaml_1_2(text: str, value: Any) -> None:
    assert parse_value(text) == value
    assert type(parse_value(text)) is type(value)


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(values)
def test_a_written_value_reads_back_the_same_on_one_line(value: Any) -> None:
    text = dump_value(value)
    assert len(text.splitlines()) <= 1
    assert parse_value(text) == value or (value == "" and parse_value(text) == "")


@given(scalars)
def test_other_yaml_readers_agree_on_written_texts(value: Any) -> None:
    if isinstance(value, str):
        assert yaml.safe_load(dump_value(value)) == value


@given(st.dictionaries(st.text(min_size=1, max_size=5), values, max_size=4))
def test_a_written_tree_reads_back_the_same(tree: dict[str, Any]) -> None:
    assert (parse_file(dump_tree(tree), "f")[0] or {}) == tree


def test_comments_do_not_change_what_is_read() -> None:
    tree = {"a": {"b": "# no comment", "c": [{"d": 1}, {"d": {"e": 2}}]}}
    text = dump_tree(tree, {"a.b": "--b", "a.c.0.d": "run.yaml:3"})
    assert "# --b" in text
    assert "# run.yaml:3" in text
    assert parse_file(text, "f")[0] == tree


def test_lines_are_counted_from_one_and_reach_into_lists() -> None:
    _, lines = parse_file("a: 1\nb:\n  c: 2\nd:\n  - e: 3\n    f: 4\n", "f")
    assert lines[("a",)] == 1
    assert lines[("b", "c")] == 3
    assert lines[("d", "0", "f")] == 6


def test_a_key_that_stands_twice_is_an_error_with_both_lines() -> None:
    with pytest.raises(UsageError) as caught:
        parse_file("a: 1\nb: 2\na: 3\n", "run.yaml")
    assert "a stands twice" in caught.value.what
    assert caught.value.where == "run.yaml:1 and run.yaml:3"


def test_broken_yaml_names_file_and_line() -> None:
    with pytest.raises(UsageError) as caught:
        parse_file("a: 1\nb: [1, 2\n", "run.yaml")
    assert "run.yaml" in str(caught.value)
    assert caught.value.where is not None
    assert caught.value.where.startswith("run.yaml:")
