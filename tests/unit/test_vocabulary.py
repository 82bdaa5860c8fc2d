"""A teacher or a reference with another vocabulary is refused; the first difference is named."""

from __future__ import annotations

import pytest

from rlx.core.errors import UsageError
from rlx.core.offline.vocabulary import check_reference, check_teacher

OURS = {"a": 0, "b": 1, "c": 2}


def test_the_same_vocabulary_in_another_order_is_the_same() -> None:
    check_teacher("big", {"c": 2, "a": 0, "b": 1}, "small", OURS)


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
        check_teacher("big", theirs, "small", OURS)
    assert expected in caught.value.what
    assert caught.value.where == "offline.teacher"
    assert "rlx generate TEACHER" in (caught.value.fix or "")


@pytest.mark.parametrize("theirs", [{"a": 0, "b": 1}, {**OURS, "d": 3}])
def test_a_reference_may_have_more_or_fewer_tokens(theirs: dict[str, int]) -> None:
    check_reference("base", theirs, "tuned", OURS)


def test_a_reference_with_other_tokens_is_refused() -> None:
    with pytest.raises(UsageError, match="the reference base has another vocabulary") as caught:
        check_reference("base", {"a": 0, "c": 1, "d": 7}, "tuned", OURS)
    assert "token 1 is 'c' there and 'b' here" in caught.value.what
    assert caught.value.where == "kl.reference"
