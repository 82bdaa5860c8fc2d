"""The version of the contracts between rlx and its plugins, and what each version changed.

A plugin states what it was built for with `RLX_API_VERSION = 1` in the module of a component or
hook plugin, or with `@rlx.component(api_version=1)`. Stating nothing means the current version.
"""

from __future__ import annotations

import sys
from typing import Any, Final

from rlx.core.component import tags_of

API_VERSION = 1
"""Raised when a change to a contract can break a plugin that works today."""

CHANGES: Final[dict[int, str]] = {}
"""What a plugin's author must know about each version after the first, in a sentence."""

MODULE_ATTRIBUTE: Final = "RLX_API_VERSION"


def stated_version(obj: Any) -> Any:
    """Return what a component or hook plugin says it was built for; None when it says nothing."""
    tagged = tags_of(obj).extra.get("api_version")
    if tagged is not None:
        return tagged
    direct = getattr(obj, MODULE_ATTRIBUTE, None)
    if direct is not None:
        return direct
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    return getattr(module, MODULE_ATTRIBUTE, None)


def version_warning(obj: Any, label: str) -> str | None:
    """Return what a user of a plugin for another API version must know; None when all is well."""
    stated = stated_version(obj)
    if stated is None:
        return None
    if isinstance(stated, bool) or not isinstance(stated, int) or stated < 1:
        return (
            f"{label} states the plugin API version {stated!r}; it is a whole number from 1 on, "
            f"for this rlx {API_VERSION}"
        )
    if stated == API_VERSION:
        return None
    if stated > API_VERSION:
        return (
            f"{label} was built for version {stated} of the plugin API, "
            f"this rlx has {API_VERSION}: upgrade rlx"
        )
    changed = "; ".join(
        f"version {version}: {CHANGES[version]}"
        for version in range(stated + 1, API_VERSION + 1)
        if version in CHANGES
    )
    return (
        f"{label} was built for version {stated} of the plugin API, this rlx has {API_VERSION}. "
        f"Since then: {changed}"
    )
