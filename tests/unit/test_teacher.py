"""A teacher with another vocabulary is refused, with the first token that differs."""

from __future__ import annotations

import pytest

from rlx.core.errors import UsageError
from rlx.core.offline.teacher import check_vocabulary

OURS = {"a": 0, "b": 1, "c": 2}


def test_the_same_vocabulary_in_another_order_is_the_same() -> None:
    check_vocabulary("big", {"c": 2, "a": 0, "b": 1}, "small", OURS)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"a": 0, "c": 1, "b": 2}, "token 1 is 'c' there and 'b' here (3 and 3 tokens)"),
        ({"a": 0, "b": 1}, "token 2 is none there and 'c' here (2 and 3 tokens)"),
        ({**OURS, "d": 3}, "token 3 is 'd' there and none here (4 and 3 tokens)"),
        ({}, "token 0 is none there and 'a' here (0 and 3 tokens)"),
    ],
)
def test_the_first_difference_is_named(theirs: dict[str, int], expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        check_vocabulary("big", theirs, "small", OURS)
    assert expected in caught.value.what
    assert caught.value.where == "offline.teacher"
    assert "rlx generate TEACHER" in (caught.value.fix or "")
