from __future__ import annotations

import copy
import pickle

import pytest

from rlx.core.component import (
    KINDS,
    REQUIREMENTS,
    Bound,
    Tags,
    component,
    kind_of,
    singular,
    tags_of,
)
from rlx.core.errors import UsageError
from rlx.core.references import ComponentRef


@component
def bare(x):
    return x


@component(
    requires={"values", "groups"},
    scope="group",
    needs_label=True,
    aggregation="token-mean",
    colour="red",
)
def tagged(x, *, factor: float = 2.0):
    return x * factor


class Counter:
    """Counts its calls."""

    def __init__(self, *, start: int = 0, needs_critic: bool = False) -> None:
        self.count = start
        self.needs_critic = needs_critic

    @property
    def requires(self) -> set[str]:
        return {"values"} if self.needs_critic else set()

    def __call__(self, x: int) -> int:
        self.count += x
        return self.count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def bound(obj: object, **params: object) -> Bound:
    name = obj.__name__  # type: ignore[attr-defined]
    ref = ComponentRef(kind="losses", name=name, target=f"{__name__}:{name}", params=params)
    return ref.resolve()


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_are_accepted_in_singular_and_plural(kind: str) -> None:
    assert kind_of(kind) == kind
    assert kind_of(singular(kind).upper()) == kind


def test_unknown_kind_names_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'estimator'"):
        kind_of("estimater")


def test_tags_are_read_back_and_untagged_objects_have_the_defaults() -> None:
    assert tags_of(tagged) == Tags(
        requires=frozenset({"values", "groups"}),
        scope="group",
        needs_label=True,
        aggregation="token-mean",
        extra={"colour": "red"},
    )
    assert tags_of(bare) == tags_of(len) == tags_of(Counter()) == Tags()


def test_decorator_returns_the_object_itself() -> None:
    def f(x):
        return x

    assert component(f) is f
    assert component(scope="batch")(f) is f


def test_unknown_requirement_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="did you mean 'ref_logprobs'"):
        component(requires={"ref_logprob"})
    with pytest.raises(UsageError, match="'w'"):
        component(requires="w")  # a string is one requirement, not its letters
    assert tags_of(component(requires="values")(lambda x: x)).requires == {"values"}


def test_every_requirement_of_the_design_can_be_asked_for() -> None:
    tag = component(requires=REQUIREMENTS)
    assert tags_of(tag(lambda x: x)).requires == REQUIREMENTS


def test_unknown_scope_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'group'"):
        component(scope="groups")  # type: ignore[arg-type]


def test_bound_function_has_its_parameters_applied_and_defaults_shown() -> None:
    f = bound(tagged)
    assert f(3) == 6.0
    assert f.params == {"factor": 2.0}
    assert f.requires == {"values", "groups"}
    assert f.state_dict() == {}
    assert bound(tagged, factor=3)(3) == 9
    assert repr(f) == "<loss tagged(factor=2.0)>"


def test_bound_class_is_instantiated_and_its_attributes_show_through() -> None:
    counter = bound(Counter, start=5)
    assert counter(1) == 6
    assert counter.count == 6
    assert isinstance(counter.instance, Counter)
    with pytest.raises(AttributeError, match="nothing"):
        counter.nothing  # noqa: B018


def test_instance_may_say_what_it_requires_from_its_parameters() -> None:
    assert bound(Counter).requires == frozenset()
    assert bound(Counter, needs_critic=True).requires == {"values"}


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_bound_component_keeps_its_state_when_it_is_copied(duplicate) -> None:
    counter = bound(Counter, start=5)
    counter(2)
    twin = duplicate(counter)
    assert twin(1) == 8
    assert counter.count == 7


def test_state_for_a_stateless_component_is_refused() -> None:
    bound(tagged).load_state_dict({})
    with pytest.raises(UsageError, match="no load_state_dict"):
        bound(tagged).load_state_dict({"count": 1})
