"""What the rules of the preflight look at, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rlx.core.config import RunConfig
from rlx.core.models import ModelInfo
from rlx.core.selection import Selection


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong, or has no effect."""

    level: Literal["error", "warning"]
    what: str
    key: str
    """Setting that it is about."""
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What the rules look at."""

    config: RunConfig
    selection: Selection
    info: ModelInfo
    resume: bool


Rule: TypeAlias = Callable[[Case], Iterator[Finding]]


def error(what: str, key: str, fix: str) -> Finding:
    """A finding that ends the run before it starts."""
    return Finding(level="error", what=what, key=key, fix=fix)


def warning(what: str, key: str, fix: str) -> Finding:
    """A finding that is printed."""
    return Finding(level="warning", what=what, key=key, fix=fix)
