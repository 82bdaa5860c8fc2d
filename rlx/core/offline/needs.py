"""What an objective declares by its tags: the data it reads, the model it trains, its unit.

@component(data="pairs", head="lm", per="pair", requires={"ref_logprobs"})
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from rlx.core.component import Bound, Tags, tags_of
from rlx.core.errors import UsageError, did_you_mean

Data = Literal["conversations", "pairs", "unpaired", "steps"]
Head = Literal["lm", "logits", "score", "token"]
Unit = Literal["token", "sequence", "pair"]

DATA: Final[tuple[Data, ...]] = ("conversations", "pairs", "unpaired", "steps")
"""`conversations`: all answers of a conversation, or a completion. `pairs`: a chosen and a rejected
answer. `unpaired`: an answer and whether it is desirable. `steps`: an answer in judged steps."""
HEADS: Final[tuple[Head, ...]] = ("lm", "logits", "score", "token")
"""`lm`: log-probs of the trained tokens. `logits`: all logits of them, piece by piece. `score`: one
number a sequence. `token`: one number a trained token."""
UNITS: Final[tuple[Unit, ...]] = ("token", "sequence", "pair")
REQUIRES: Final = frozenset({"ref_logprobs", "kl_baseline", "teacher_logits"})
_UNIT_OF_DATA: Final[dict[str, Unit]] = {
    "conversations": "token",
    "pairs": "pair",
    "unpaired": "sequence",
    "steps": "token",
}
_HEADS_OF_REQUIREMENT: Final = {
    "ref_logprobs": "lm",
    "kl_baseline": "lm",
    "teacher_logits": "logits",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The tags of an objective, checked."""

    data: Data = "conversations"
    head: Head = "lm"
    per: Unit = "token"
    """What one value of the loss belongs to; the mean is over all of them in the optimizer step."""
    requires: frozenset[str] = frozenset()


def needs_of(objective: Bound | Callable[..., Any]) -> Needs:
    """Read what an objective declares; raises `UsageError` for a tag that means nothing.

    >>> needs_of(lambda x: -x.logprobs).per
    'token'
    """
    tags: Tags = objective.tags if isinstance(objective, Bound) else tags_of(objective)
    requires = objective.requires if isinstance(objective, Bound) else tags.requires
    data = _one_of("data", tags.extra.get("data", "conversations"), DATA)
    head = _one_of("head", tags.extra.get("head", "lm"), HEADS)
    per = _one_of("per", tags.extra.get("per", _default_unit(data, head)), UNITS)
    if wrong := sorted(requires - REQUIRES):
        raise UsageError(
            f"an objective can't require {wrong[0]!r}",
            where="@rlx.component(requires=…)",
            fix=did_you_mean(wrong[0], REQUIRES) or f"a subset of: {', '.join(sorted(REQUIRES))}",
        )
    for requirement in sorted(requires):
        if head != _HEADS_OF_REQUIREMENT[requirement]:
            raise UsageError(
                f"an objective with head={head!r} can't require {requirement!r}",
                where="@rlx.component(requires=…)",
                fix=f"head={_HEADS_OF_REQUIREMENT[requirement]!r}",
            )
    _check_combination(data, head, per, requires)
    return Needs(data=data, head=head, per=per, requires=requires)


def _check_combination(data: str, head: str, per: str, requires: frozenset[str]) -> None:
    problem = fix = ""
    if per == "pair" and data != "pairs":
        problem, fix = f"per='pair' has no meaning for data={data!r}", "data='pairs'"
    elif head == "logits" and per != "token":
        problem, fix = "head='logits' gives pieces of sequences", "per='token'"
    elif head == "score" and per == "token":
        problem, fix = "head='score' gives no number for a token", "per='sequence'"
    elif "kl_baseline" in requires and data != "unpaired":
        problem, fix = f"there is no kl_baseline for data={data!r}", "data='unpaired'"
    if problem:
        raise UsageError(problem, where="@rlx.component(…)", fix=fix)


def _default_unit(data: str, head: str) -> Unit:
    unit = _UNIT_OF_DATA[data]
    return "sequence" if head == "score" and unit == "token" else unit


def _one_of(tag: str, value: Any, words: tuple[Any, ...]) -> Any:
    if value not in words:
        raise UsageError(
            f"an objective can't have {tag}={value!r}",
            where=f"@rlx.component({tag}=…)",
            fix=did_you_mean(str(value), words) or f"one of: {', '.join(words)}",
        )
    return value
