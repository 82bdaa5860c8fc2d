"""Components: their kinds, the tags that `@rlx.component` attaches, and `Bound`, one ready to call.

Tagging never registers anything: names come from entry points and from `rlx_register_*` hooks.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

from rlx.core.calls import Call
from rlx.core.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from rlx.core.references import ComponentRef

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
    {
        "values",
        "ref_logprobs",
        "old_logprobs",
        "groups",
        "entropy",
        "reward_model",
        "kl_baseline",
        "teacher_logits",
    }
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
    loads: tuple[str, ...] = ()
    """Parameters that name models, each a folder or a hub name or a list of them, which the
    component loads where it runs: they are looked for before anything starts, and planned for."""
    ordered: tuple[str, ...] = ()
    """Parameters, numbers, of which none may be larger than the next: `("low", "high")`."""
    libraries: tuple[str, ...] = ()
    """Packages that the component imports only when it runs: that they are installed is checked
    before anything starts."""
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
    loads: Collection[str] = ...,
    ordered: Sequence[str] = ...,
    libraries: Collection[str] = ...,
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
    loads: Collection[str] = (),
    ordered: Sequence[str] = (),
    libraries: Collection[str] = (),
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
        loads=(loads,) if isinstance(loads, str) else tuple(loads),
        ordered=tuple(ordered),
        libraries=(libraries,) if isinstance(libraries, str) else tuple(libraries),
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


class Bound:
    """A component that is ready to be called: a function with its parameters, or an instance.

    Attributes beyond those below are the instance's own. Pickles as its reference plus state.
    """

    __slots__ = ("_call", "_who", "instance", "params", "ref")

    def __init__(self, *, ref: ComponentRef, obj: Any, params: Mapping[str, Any]) -> None:
        self.ref = ref
        self.params: dict[str, Any] = dict(params)
        """Validated, defaults included."""
        self._who = f"{singular(ref.kind)} {ref.name!r}"
        self.instance: Any = obj
        """The instance of a class component, else the function."""
        if inspect.isclass(obj):
            with Call(f"{self._who} in __init__()"):
                self.instance = obj(**params)
        bound: Any = self.instance if inspect.isclass(obj) else functools.partial(obj, **params)
        self._call: Callable[..., Any] = bound

    def __call__(self, *args: Any) -> Any:
        with Call(self._who):
            return self._call(*args)

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def tags(self) -> Tags:
        return tags_of(self.instance)

    @property
    def requires(self) -> frozenset[str]:
        """Passes that the engine must run. An instance's own `requires` goes before its tags',
        for components whose needs depend on their parameters."""
        own = getattr(self.instance, "requires", None)
        return self.tags.requires if own is None or callable(own) else frozenset(own)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must carry; empty for a stateless component."""
        save = getattr(self.instance, "state_dict", None)
        if not callable(save):
            return {}
        with Call(f"{self._who} in state_dict()"):
            return dict(save())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`'s answer. Raises `UsageError` where there is no way to take it."""
        restore = getattr(self.instance, "load_state_dict", None)
        if callable(restore):
            with Call(f"{self._who} in load_state_dict()"):
                restore(dict(state))
        elif state:
            raise UsageError(
                f"the checkpoint has state for {singular(self.ref.kind)} {self.name!r}, "
                "which has no load_state_dict",
                fix="resume with the component that wrote the checkpoint",
            )

    def __getattr__(self, name: str) -> Any:
        if name in Bound.__slots__:  # unpickling and copying look before __init__ has run
            raise AttributeError(name)
        return getattr(self.instance, name)

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.params.items())
        return f"<{singular(self.ref.kind)} {self.name}({inside})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.ref, self.state_dict())


def _rebuild(ref: ComponentRef, state: Mapping[str, Any]) -> Bound:
    bound = ref.resolve()
    if state:
        bound.load_state_dict(state)
    return bound
