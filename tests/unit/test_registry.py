from __future__ import annotations

import pytest

from rlx.core.component import KINDS
from rlx.core.errors import UsageError
from rlx.core.plugins import PluginSystem
from rlx.core.registry import Entry, Provider, Registrar, Registry

OWN = Provider(distribution="rlx", version="1", builtin=True)
FOO = Provider(distribution="rlx-foo", version="0.3")
BAR = Provider(distribution="rlx-bar", version="2.0")


def registry(*offers: tuple[Provider, str, str]) -> Registry:
    made = Registry()
    for provider, name, target in offers:
        made.add(
            Entry(kind="losses", name=name, target=target, provider=provider, door="entry point")
        )
    return made


def test_unambiguous_name_is_found_and_unknown_is_none() -> None:
    found = registry((FOO, "x", "foo:x")).find("loss", "x")
    assert found is not None
    assert found.target == "foo:x"
    assert registry().find("loss", "x") is None


def test_conflict_is_an_error_only_when_selected_and_names_both_ways_out() -> None:
    made = registry((FOO, "x", "foo:x"), (BAR, "x", "bar:x"), (BAR, "y", "bar:y"))
    assert made.find("losses", "y") is not None
    assert [entry.provider for entry in made.conflicts("losses", "x")] == [FOO, BAR]
    with pytest.raises(UsageError) as caught:
        made.find("losses", "x", where="--loss")
    assert caught.value.what == "the loss 'x' is offered by rlx-foo 0.3 and rlx-bar 2.0"
    assert caught.value.fix == "say which one: rlx-foo/x or rlx-bar/x"
    assert caught.value.where == "--loss"


@pytest.mark.parametrize("spelling", ["rlx-bar/x", "rlx_bar/x", "RLX.Bar/x"])
def test_distribution_chooses_whatever_its_spelling(spelling: str) -> None:
    found = registry((FOO, "x", "foo:x"), (BAR, "x", "bar:x")).find("losses", spelling)
    assert found is not None
    assert found.provider is BAR


def test_builtin_name_can_not_be_taken_over() -> None:
    made = registry((FOO, "ppo", "foo:ppo"), (OWN, "ppo", "rlx.plugins.losses.ppo:ppo"))
    own, foreign = made.find("losses", "ppo"), made.find("losses", "rlx-foo/ppo")
    assert own is not None
    assert own.provider is OWN
    assert foreign is not None
    assert foreign.provider is FOO
    assert made.conflicts("losses", "ppo") == []


def test_same_target_through_both_doors_is_one_entry() -> None:
    made = registry((FOO, "x", "foo:x"))
    Registrar(made, "losses", FOO).add("x", "foo:x")
    assert len(list(made.entries("losses"))) == 1


def test_one_distribution_with_two_targets_for_a_name_is_told_apart_by_target() -> None:
    made = registry((FOO, "x", "foo:x"), (FOO, "x", "foo:other"))
    with pytest.raises(UsageError, match="twice: foo:x and foo:other"):
        made.find("losses", "x")


@pytest.mark.parametrize("name", ["", "a/b", "a:b", "a b", "a@b"])
def test_name_that_could_not_be_selected_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="could not be selected"):
        registry((FOO, name, "foo:x"))


@pytest.mark.parametrize("target", ["foo", ":x", "foo:"])
def test_target_without_module_or_attribute_is_refused(target: str) -> None:
    with pytest.raises(UsageError, match="module:attr"):
        Registrar(Registry(), "losses", FOO).add("x", target)


def test_unknown_name_has_a_suggestion_a_listing_or_the_right_kind() -> None:
    made = registry((FOO, "clipped", "foo:x"))
    made.add(Entry(kind="rewards", name="math", target="m:m", provider=FOO, door="hook"))
    assert made.unknown("losses", "cliped").fix == "did you mean 'clipped'?"
    assert "one of: clipped; or pkg.mod:attr" in str(made.unknown("losses", "zzz").fix)
    assert "'math' is among the rewards" in str(made.unknown("losses", "math").fix)
    assert made.unknown("losses", "rlx-bar/clipped").fix == "offered by: rlx-foo/clipped"


def test_names_show_builtin_ones_first() -> None:
    made = registry((FOO, "a", "f:a"), (OWN, "z", "o:z"), (OWN, "b", "o:b"))
    assert made.names("losses") == ["b", "z", "a"]


def test_builtins_of_every_kind_are_registered_without_importing_them() -> None:
    system = PluginSystem.load(rlxfile=False)
    assert "group_norm" in system.names("estimators")
    for kind in set(KINDS) - {"objectives"}:
        assert system.names(kind), kind
    for entry in system.registry.entries():
        assert isinstance(entry.target, str)


def builtin_names() -> list[tuple[str, str]]:
    system = PluginSystem.load(hooks=False, rlxfile=False)
    return [
        (entry.kind, entry.name) for entry in system.registry.entries() if entry.provider.builtin
    ]


@pytest.mark.parametrize(("kind", "name"), builtin_names())
def test_every_builtin_can_be_selected(kind: str, name: str) -> None:
    ref = PluginSystem.load(hooks=False, rlxfile=False).locate(kind, name)
    assert ref.distribution == "rlx"
    assert len(ref.source_hash or "") == 64
