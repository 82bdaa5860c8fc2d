"""Which installed distributions offer something to rlx; reads metadata, imports nothing."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlx.core.component import KINDS
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.registry import Provider

HOOK_GROUP: Final = "rlx"
COMMAND_GROUP: Final = "rlx.commands"
ALLOW_VARIABLE: Final = "RLX_PLUGINS"
STRICT_VARIABLE: Final = "RLX_STRICT_PLUGINS"
_GROUPS: Final = frozenset({HOOK_GROUP, COMMAND_GROUP, *(f"rlx.{kind}" for kind in KINDS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDistribution:
    """A distribution with entry points in rlx's groups."""

    provider: Provider
    entry_points: Sequence[importlib.metadata.EntryPoint]

    def in_group(self, group: str) -> list[importlib.metadata.EntryPoint]:
        return [point for point in self.entry_points if point.group == group]


def scan() -> list[PluginDistribution]:
    """Return the plugin distributions on `sys.path`, one per normalised name.

    An editable install can be seen twice (its build folder and site-packages): the first on the
    path counts, as it does for imports.
    """
    found: dict[str, PluginDistribution] = {}
    for distribution in importlib.metadata.distributions():
        text = distribution.read_text("entry_points.txt")
        if not text or "[rlx" not in text:
            continue
        points = [point for point in distribution.entry_points if point.group in _GROUPS]
        name, version = _name_and_version(distribution)
        if points and name and name not in found:
            provider = Provider(distribution=name, version=version)
            found[name] = PluginDistribution(provider=provider, entry_points=points)
    return sorted(found.values(), key=lambda item: item.provider.distribution)


def own_version() -> str | None:
    """Return the version of the installed rlx; None when it runs from a bare source tree."""
    try:
        return importlib.metadata.version("rlx")
    except importlib.metadata.PackageNotFoundError:
        return None


class Selection:
    """Which plugins are switched on: the allow-list of `RLX_PLUGINS` and the disable list."""

    def __init__(self, disable: Collection[str] = ()) -> None:
        listed = os.environ.get(ALLOW_VARIABLE)
        self.allowed = None if listed is None else _words(listed)
        self.disabled = {canonicalize_name(name) for name in disable}

    def admits(self, *names: str) -> bool:
        """Say whether something that goes by these names (distribution, entry point) may load."""
        known = {canonicalize_name(name) for name in names}
        if known & self.disabled:
            return False
        return self.allowed is None or bool(known & self.allowed)

    def unused(self, distributions: Collection[PluginDistribution]) -> Iterator[str]:
        """Yield what is named in `RLX_PLUGINS` and not installed."""
        if not self.allowed:
            return
        known = {"rlxfile"}
        for distribution in distributions:
            known.add(canonicalize_name(distribution.provider.distribution))
            known.update(canonicalize_name(point.name) for point in distribution.entry_points)
        for name in sorted(self.allowed - known):
            hint = did_you_mean(name, known)
            yield f"{ALLOW_VARIABLE} names {name!r}, which is not installed; {hint}".rstrip("; ")


def check_required(required: Collection[str]) -> None:
    """Check requirement specifiers against what is installed; raises `UsageError`."""
    for text in required:
        try:
            requirement = Requirement(text)
        except InvalidRequirement as error:
            raise UsageError(
                f"{text!r} is no requirement: {error}",
                where="plugins.required",
                fix="write it as for pip, for example 'rlx-foo>=0.3'",
            ) from error
        try:
            installed = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError as error:
            raise UsageError(
                f"the required plugin {requirement.name!r} is not installed",
                where="plugins.required",
                fix=f"pip install {text!r}",
            ) from error
        if not requirement.specifier.contains(installed, prereleases=True):
            raise UsageError(
                f"{requirement.name} {installed} is installed, and the run requires {text!r}",
                where="plugins.required",
                fix=f"pip install {text!r}",
            )


def _name_and_version(
    distribution: importlib.metadata.Distribution,
) -> tuple[str | None, str | None]:
    """Read two header lines; parsing the whole metadata costs a hundred times as much."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    name = version = None
    for line in text.splitlines():
        if not line:
            break
        key, _, value = line.partition(":")
        if key.lower() == "name":
            name = canonicalize_name(value.strip())
        elif key.lower() == "version":
            version = value.strip()
    return name, version


def _words(text: str) -> set[str]:
    return {canonicalize_name(word) for word in text.replace(",", " ").split()}
