"""The registry: which names there are, who offers them and where their targets lie.

Nothing is imported here. A name that two distributions offer is an error when it is *selected*;
`dist/name` says which one is meant. A built-in's name stays the built-in's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from packaging.utils import canonicalize_name

from rlx.core.component import KINDS, kind_of, singular
from rlx.core.errors import UsageError, did_you_mean

BUILTIN = "rlx"
_NAME = re.compile(r"\w[\w.+-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """Who offers something: a distribution, or a project's own `rlxfile.py`."""

    distribution: str
    version: str | None = None
    builtin: bool = False

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" if self.version else self.distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One name that one provider offers."""

    kind: str
    name: str
    target: str | Any
    """`module:attr`, or the object itself where a hook registered one."""
    provider: Provider
    door: Literal["entry point", "hook"]


class Registry:
    """Entries by kind and name."""

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, list[Entry]]] = {kind: {} for kind in KINDS}
        self._left_out: dict[tuple[str, str], tuple[Provider, str]] = {}

    def leave_out(self, kind: str, name: str, provider: Provider, way: str) -> None:
        """Note a name that is installed and switched off, and the way to have it."""
        self._left_out[kind, name] = (provider, way)

    def add(self, entry: Entry) -> None:
        """Take an entry. Raises `UsageError` for a name that could not be selected."""
        if not _NAME.fullmatch(entry.name):
            raise UsageError(
                f"{entry.provider} registers the {singular(entry.kind)} {entry.name!r}, "
                "a name that could not be selected",
                fix="use letters, digits, dots, dashes and underscores",
            )
        same = self._entries[entry.kind].setdefault(entry.name, [])
        twice = any(
            other.provider == entry.provider and other.target == entry.target for other in same
        )
        if not twice:  # a plugin may offer the same target through both doors
            same.append(entry)

    def forget_hooks(self, provider: Provider) -> None:
        """Take back what a provider registered through hooks: it broke half-way."""
        for names in self._entries.values():
            for name in list(names):
                kept = [e for e in names[name] if e.provider != provider or e.door != "hook"]
                if kept:
                    names[name] = kept
                else:
                    del names[name]

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind, built-in ones first, then sorted."""
        names = self._entries[kind_of(kind)]
        return sorted(names, key=lambda name: (not self._has_builtin(kind, name), name))

    def entries(self, kind: str | None = None) -> Iterator[Entry]:
        """Yield all entries, conflicting ones included."""
        for each in KINDS if kind is None else (kind_of(kind),):
            for name in self.names(each):
                yield from self._entries[each][name]

    def conflicts(self, kind: str, name: str) -> list[Entry]:
        """Return the entries among which a bare name can't choose; empty when it can."""
        entries = self._entries[kind_of(kind)].get(name, [])
        return [] if len(entries) < 2 or self._has_builtin(kind, name) else entries

    def find(self, kind: str, text: str, *, where: str | None = None) -> Entry | None:
        """Return the entry for `name` or `dist/name`; None when nobody offers it.

        Raises `UsageError` when several distributions offer the bare name.
        """
        kind = kind_of(kind)
        distribution, _, name = text.rpartition("/")
        entries = self._entries[kind].get(name, [])
        if distribution:
            wanted = canonicalize_name(distribution)
            entries = [
                entry
                for entry in entries
                if canonicalize_name(entry.provider.distribution) == wanted
            ]
        elif self._has_builtin(kind, name):
            entries = [entry for entry in entries if entry.provider.builtin]
        if len(entries) > 1:
            raise _ambiguous(kind, name, entries, where)
        return entries[0] if entries else None

    def unknown(self, kind: str, text: str, *, where: str | None = None) -> UsageError:
        """Return the error for a name that nobody offers: what is near, or of which kind it is."""
        kind = kind_of(kind)
        distribution, _, name = text.rpartition("/")
        others = [other for other in KINDS if other != kind and name in self._entries[other]]
        offered = [
            f"{entry.provider.distribution}/{name}" for entry in self._entries[kind].get(name, [])
        ]
        provider, way = self._left_out.get((kind, name), (None, ""))
        if provider is not None and not offered:
            return UsageError(
                f"the {singular(kind)} {name!r} of {provider} is switched off", where=where, fix=way
            )
        if distribution and offered:
            fix = f"offered by: {', '.join(offered)}"
        elif hint := did_you_mean(name, self._entries[kind]):
            fix = hint
        elif others:
            fix = f"{name!r} is among the {others[0]}; {self._listing(kind)}"
        else:
            fix = self._listing(kind)
        return UsageError(f"there is no {singular(kind)} {text!r}", where=where, fix=fix)

    def _listing(self, kind: str) -> str:
        names = self.names(kind)
        known = f"one of: {', '.join(names)}; or " if names else ""
        return f"{known}pkg.mod:attr or path/to/file.py:attr"

    def _has_builtin(self, kind: str, name: str) -> bool:
        entries = self._entries[kind_of(kind)].get(name, [])
        return any(entry.provider.builtin for entry in entries)


class Registrar:
    """What `rlx_register_*` hooks are given: adds names of one kind for one provider."""

    def __init__(self, registry: Registry, kind: str, provider: Provider) -> None:
        self._registry = registry
        self.kind = kind
        self.provider = provider

    def add(self, name: str, target: Any) -> None:
        """Offer `name`. `target` is `"module:attr"` (imported when selected) or the object."""
        if isinstance(target, str) and not all(target.rpartition(":")[::2]):
            raise UsageError(
                f"{self.provider} registers the {singular(self.kind)} {name!r} "
                f"with the target {target!r}",
                fix='write the target as "module:attr"',
            )
        self._registry.add(
            Entry(kind=self.kind, name=name, target=target, provider=self.provider, door="hook")
        )


def _ambiguous(kind: str, name: str, entries: list[Entry], where: str | None) -> UsageError:
    distributions = {entry.provider.distribution for entry in entries}
    who = " and ".join(str(entry.provider) for entry in entries)
    if len(distributions) == 1:
        targets = " and ".join(str(entry.target) for entry in entries)
        return UsageError(
            f"{entries[0].provider} offers the {singular(kind)} {name!r} twice: {targets}",
            where=where,
            fix=f"select it by its target: {entries[0].target}",
        )
    ways = " or ".join(f"{entry.provider.distribution}/{name}" for entry in entries)
    return UsageError(
        f"the {singular(kind)} {name!r} is offered by {who}",
        where=where,
        fix=f"say which one: {ways}",
    )
