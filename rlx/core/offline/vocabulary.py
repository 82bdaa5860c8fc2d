"""Whether another model's numbers for a token are about the token that the trained model means."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.core.errors import UsageError


def check_teacher(
    teacher: str, theirs: Mapping[str, int], model: str, ours: Mapping[str, int]
) -> None:
    """Raise UsageError unless both tokenizers give every id the same token: whole distributions are
    compared.

    Args:
        theirs, ours: token → id, of the teacher named `teacher` and of the student `model`.
    """
    _check(
        f"the teacher {teacher}",
        theirs,
        model,
        ours,
        shared_only=False,
        where="offline.teacher",
        fix="a teacher with the student's tokenizer; of any other, fine-tune on its samples "
        "(`rlx generate TEACHER`)",
    )


def check_reference(
    reference: str, theirs: Mapping[str, int], model: str, ours: Mapping[str, int]
) -> None:
    """Raise UsageError unless both tokenizers agree on every id that both have: one may have more.

    Args:
        theirs, ours: token → id, of the reference named `reference` and of the policy `model`.
    """
    _check(
        f"the reference {reference}",
        theirs,
        model,
        ours,
        shared_only=True,
        where="kl.reference",
        fix="a reference with the policy's tokenizer; unset, it is the starting weights",
    )


def _check(
    named: str,
    theirs: Mapping[str, int],
    model: str,
    ours: Mapping[str, int],
    *,
    shared_only: bool,
    where: str,
    fix: str,
) -> None:
    if theirs == ours:
        return
    other, own = ({number: token for token, number in words.items()} for words in (theirs, ours))
    numbers = other.keys() & own.keys() if shared_only else other.keys() | own.keys()
    wrong = [number for number in numbers if other.get(number) != own.get(number)]
    if not wrong:
        return
    number = min(wrong)
    raise UsageError(
        f"{named} has another vocabulary than {model}: token {number} is "
        f"{_shown(other.get(number))} there and {_shown(own.get(number))} here "
        f"({len(other):,} and {len(own):,} tokens)",
        where=where,
        fix=fix,
    )


def _shown(token: str | None) -> str:
    return "none" if token is None else repr(token)
