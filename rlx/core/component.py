"""What a component says about itself: kinds, and the tags that `@rlx.component` attaches.

Tagging never registers anything: names come from entry points and from `rlx_register_*` hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeVar, overload

from rlx.core.errors import UsageError, did_you_mean

KINDS: Final = (
    "estimators",
    "losses",
    "rewards",
    "agents",
    "samplers",
    "corrections",
    "objectives",
    "trackers",
)
REQUIREMENTS: Final = frozenset(
    {"values", "ref_logprobs", "old_logprobs", "groups", "entropy", "reward_model"}
)
Scope = Literal["rollout", "group", "batch"]
_SCOPES: Final = ("rollout", "group", "batch")
_SINGULAR: Final = {
    "estimators": "estimator",
    "losses": "loss",
    "rewards": "reward",
    "agents": "agent",
    "samplers": "sampler",
    "corrections": "correction",
    "objectives": "objective",
    "trackers": "tracker",
}
_ATTRIBUTE: Final = "__rlx_tags__"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What a component declares, so that the core can serve it without knowing it."""

    requires: frozenset[str] = frozenset()
    """Passes that the engine must run: a subset of `REQUIREMENTS`."""
    scope: Scope = "rollout"
    """What one call is given: a rollout, the list of a group, the list of the batch (rewards)."""
    needs_label: bool = False
    """Every task must have a label (rewards)."""
    aggregation: str | None = None
    """Reduction over tokens that the component was published with; None: no preference."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Tags that the core gives no meaning to."""


def kind_of(text: str) -> str:
    """Return the kind for its plural or singular name; raises `UsageError` for other words.

    >>> kind_of("loss"), kind_of("losses")
    ('losses', 'losses')
    """
    word = text.strip().lower()
    for kind, one in _SINGULAR.items():
        if word in (kind, one):
            return kind
    known = [*KINDS, *_SINGULAR.values()]
    raise UsageError(
        f"there is no component kind {text!r}",
        fix=did_you_mean(word, known) or f"one of: {', '.join(KINDS)}",
    )


def singular(kind: str) -> str:
    """Return the word for one component of a kind (`losses` → `loss`)."""
    return _SINGULAR[kind_of(kind)]


@overload
def component(obj: T, /) -> T: ...
@overload
def component(
    *,
    requires: Collection[str] = ...,
    scope: Scope = ...,
    needs_label: bool = ...,
    aggregation: str | None = ...,
    **tags: Any,
) -> Callable[[T], T]: ...
def component(
    obj: Any = None,
    /,
    *,
    requires: Collection[str] = frozenset(),
    scope: Scope = "rollout",
    needs_label: bool = False,
    aggregation: str | None = None,
    **tags: Any,
) -> Any:
    """Tag a function or class with what it needs; further keywords are kept in `Tags.extra`.

    Raises `UsageError` where the decorator stands for an unknown requirement or scope.
    """
    if isinstance(requires, str):
        requires = {requires}
    for requirement in sorted(set(requires) - REQUIREMENTS):
        raise UsageError(
            f"a component can't require {requirement!r}",
            where="@rlx.component(requires=…)",
            fix=did_you_mean(requirement, REQUIREMENTS)
            or f"a subset of: {', '.join(sorted(REQUIREMENTS))}",
        )
    if scope not in _SCOPES:
        raise UsageError(
            f"there is no scope {scope!r}",
            where="@rlx.component(scope=…)",
            fix=did_you_mean(scope, _SCOPES) or f"one of: {', '.join(_SCOPES)}",
        )
    declared = Tags(
        requires=frozenset(requires),
        scope=scope,
        needs_label=needs_label,
        aggregation=aggregation,
        extra=tags,
    )

    def tag(target: T) -> T:
        setattr(target, _ATTRIBUTE, declared)
        return target

    return tag if obj is None else tag(obj)


def tags_of(obj: object) -> Tags:
    """Return what a function, class or instance declares; untagged objects have the defaults."""
    tags = getattr(obj, _ATTRIBUTE, None)
    return tags if isinstance(tags, Tags) else Tags()
