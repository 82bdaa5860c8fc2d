"""Which installed distributions offer something to rlx; reads metadata, imports nothing."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlx.core.component import KINDS
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.registry import BUILTIN, Provider

HOOK_GROUP: Final = "rlx"
COMMAND_GROUP: Final = "rlx.commands"
ALLOW_VARIABLE: Final = "RLX_PLUGINS"
STRICT_VARIABLE: Final = "RLX_STRICT_PLUGINS"
_GROUPS: Final = frozenset({HOOK_GROUP, COMMAND_GROUP, *(f"rlx.{kind}" for kind in KINDS)})
_TARGET: Final = re.compile(r"[\w.]+\s*(:\s*[\w.]+\s*)?(\[.*\])?")


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginDistribution:
    """A distribution with entry points in rlx's groups."""

    provider: Provider
    entry_points: Sequence[importlib.metadata.EntryPoint]
    problems: Sequence[str] = ()
    """What of its entry points can't be used, and why."""

    def in_group(self, group: str) -> list[importlib.metadata.EntryPoint]:
        return [point for point in self.entry_points if point.group == group]


def scan() -> list[PluginDistribution]:
    """Return the plugin distributions on `sys.path`, one per normalised name.

    An editable install can be seen twice (its build folder and site-packages): the first on the
    path counts, as it does for imports. Metadata that is damaged never raises: what can't be read
    is left out, and named in `problems`.
    """
    found: dict[str, PluginDistribution] = {}
    for distribution in importlib.metadata.distributions():
        text = _text(distribution, "entry_points.txt")
        if "[rlx" not in text:
            continue
        name, version = _name_and_version(distribution)
        points, problems = _entry_points(text)
        if (points or problems) and name and name not in found:
            found[name] = PluginDistribution(
                provider=Provider(distribution=name, version=version),
                entry_points=points,
                problems=problems,
            )
    return sorted(found.values(), key=lambda item: item.provider.distribution)


def unreadable_metadata() -> UsageError | None:
    """What to say of installed distributions whose metadata is not UTF-8; None: there are none."""
    found = []
    for distribution in importlib.metadata.distributions():
        for file in ("entry_points.txt", "METADATA"):
            try:
                distribution.read_text(file)
            except UnicodeDecodeError:
                found.append(str(Path(str(getattr(distribution, "_path", "?"))) / file))
            except OSError:
                continue
    if not found:
        return None
    return UsageError(
        "the metadata of an installed package is not UTF-8, and Python can't read what is "
        f"installed: {'; '.join(found)}",
        fix="remove or install again the package that it belongs to",
    )


def _text(distribution: importlib.metadata.Distribution, file: str) -> str:
    """Return a metadata file; a damaged one as far as it can be read, a missing one as ''."""
    try:
        return distribution.read_text(file) or ""
    except UnicodeDecodeError as error:
        return error.object.decode("utf-8", "replace")
    except OSError:
        return ""


def _entry_points(text: str) -> tuple[list[importlib.metadata.EntryPoint], list[str]]:
    """Read the entry points of rlx's groups, and what is wrong with others of them."""
    points: list[importlib.metadata.EntryPoint] = []
    problems: list[str] = []
    group = ""
    for line in map(str.strip, text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
            if group.startswith("rlx.") and group not in _GROUPS:
                known = did_you_mean(group, _GROUPS)
                problems.append(f"there is no entry-point group {group!r}; {known}".rstrip("; "))
        elif group in _GROUPS and line and not line.startswith(("#", ";")):
            name, equals, value = (part.strip() for part in line.partition("="))
            if name and equals and _TARGET.fullmatch(value):
                points.append(importlib.metadata.EntryPoint(name, value, group))
            else:
                problems.append(
                    f"the entry point {line!r} of the group {group!r} is not name = module:attr"
                )
    return points, problems


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
        return self.refusal(*names) is None

    def refusal(self, *names: str) -> str | None:
        """Return what keeps something off that goes by these names; None when nothing does."""
        known = {canonicalize_name(name) for name in names}
        if off := known & self.disabled:
            return f"remove --no-plugin {min(off)}, or {min(off)!r} from plugins.disable"
        if self.allowed is not None and not known & self.allowed:
            return f"add it to {ALLOW_VARIABLE}, or unset that variable"
        return None

    def unused(self, distributions: Collection[PluginDistribution]) -> Iterator[str]:
        """Yield what is named and not installed: in `RLX_PLUGINS`, or to be switched off.

        A list of what to switch off may be meant for several machines: there only what looks like
        another name's misspelling is told.
        """
        known = {"rlxfile"}
        for distribution in distributions:
            known.add(canonicalize_name(distribution.provider.distribution))
            known.update(canonicalize_name(point.name) for point in distribution.entry_points)
        for name in sorted((self.allowed or set()) - known):
            hint = did_you_mean(name, known)
            yield f"{ALLOW_VARIABLE} names {name!r}, which is not installed; {hint}".rstrip("; ")
        for name in sorted(self.disabled - known - {BUILTIN}):
            if hint := did_you_mean(name, known):
                yield f"{name!r} is to be switched off and is not installed; {hint}"
        if BUILTIN in self.disabled:
            yield f"the components of {BUILTIN} itself can't be switched off"


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
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # meant for another platform or Python
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
    text = _text(distribution, "METADATA") or _text(distribution, "PKG-INFO")
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
