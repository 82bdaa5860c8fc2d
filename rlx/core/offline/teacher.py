"""Whether a teacher's distributions can be compared with a student's, token by token."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.core.errors import UsageError

_WHERE = "offline.teacher"


def check_vocabulary(
    teacher: str, theirs: Mapping[str, int], model: str, ours: Mapping[str, int]
) -> None:
    """Raise UsageError unless both tokenizers give every id the same token.

    Args:
        theirs, ours: token → id, of the teacher named `teacher` and of the student `model`.
    """
    if theirs == ours:
        return
    other, own = ({number: token for token, number in words.items()} for words in (theirs, ours))
    number = min(
        number for number in other.keys() | own.keys() if other.get(number) != own.get(number)
    )
    raise UsageError(
        f"the teacher {teacher} has another vocabulary than {model}: token {number} is "
        f"{_shown(other.get(number))} there and {_shown(own.get(number))} here "
        f"({len(other):,} and {len(own):,} tokens)",
        where=_WHERE,
        fix="a teacher with the student's tokenizer; of any other, fine-tune on its samples "
        "(`rlx generate TEACHER`)",
    )


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)
