"""Copies of what a run goes on to use, for plugins that are only to look at it."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from pydantic import BaseModel

T = TypeVar("T")


def detached(value: T) -> T:
    """Return a configuration, a mapping, a list, or a dataclass that holds one, as a copy.

    What else is inside (a component that was given as an object) is the same object.
    """
    copy: Any = value
    if isinstance(value, BaseModel):
        copy = value.model_copy()
        copy.__dict__.update({name: detached(item) for name, item in value.__dict__.items()})
    elif isinstance(value, dict):
        copy = {key: detached(item) for key, item in value.items()}
    elif isinstance(value, list):
        copy = [detached(item) for item in value]
    elif dataclasses.is_dataclass(value) and isinstance(getattr(value, "config", None), BaseModel):
        copy = dataclasses.replace(copy, config=detached(copy.config))
    return copy  # type: ignore[no-any-return]
