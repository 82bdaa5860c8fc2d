"""What every part of the configuration is made of: sections, and components by reference."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Part(BaseModel):
    """Base of every section: unknown keys are errors, attribute docstrings are the help texts."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )


class ComponentConfig(Part):
    """A component by reference, with its parameters.

    Accepts `"zscore"`, `{"name": "zscore", "params": {"eps": 1e-6}}` and the short form
    `{"name": "zscore", "eps": 1e-6}`. In Python also a function or class that its module (a
    notebook's is `__main__`) has under its own name.
    """

    name: str
    """`name`, `dist/name`, `pkg.mod:attr` or `path/to/file.py:attr`."""
    params: dict[str, Any] = {}
    """Keyword-only parameters of the component (`rlx plugins show KIND NAME` lists them)."""

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if callable(value) and not isinstance(value, BaseModel):
            return {"name": _reference(value)}
        if not isinstance(value, dict):
            return value
        if callable(value.get("name")):
            value = {**value, "name": _reference(value["name"])}
        own = set(cls.model_fields)
        inline = {key: item for key, item in value.items() if key not in own}
        kept = {key: item for key, item in value.items() if key in own}
        return {**kept, "params": {**inline, **kept.get("params", {})}} if inline else kept


class RewardConfig(ComponentConfig):
    """A reward with its weight; on the command line `name` or `name:weight`."""

    weight: float = 1.0

    @model_validator(mode="before")
    @classmethod
    def _weight_suffix(cls, value: Any) -> Any:
        if isinstance(value, str):
            value = {"name": value}
        if isinstance(value, dict) and isinstance(value.get("name"), str) and "weight" not in value:
            name, weight = split_weight(value["name"])
            return {**value, "name": name, "weight": weight}
        return value


def _reference(component: Any) -> str:
    from rlx.core.resolver import object_name, target_of

    target = target_of(component)
    if target is None:
        raise ValueError(
            f"{object_name(component)} is not under its own name in its module; define it with def "
            "or class, outside of functions"
        )
    return target


def split_weight(text: str) -> tuple[str, float]:
    """Split `style:0.5` into name and weight; `pkg.mod:attr` has no weight, whatever it is called.

    >>> split_weight("pkg.mod:attr:0.5"), split_weight("pkg.mod:attr"), split_weight("mine.py:inf")
    (('pkg.mod:attr', 0.5), ('pkg.mod:attr', 1.0), ('mine.py:inf', 1.0))
    """
    head, _, tail = text.rpartition(":")
    try:
        weight = float(tail)
    except ValueError:
        return text, 1.0
    return (head, weight) if head and math.isfinite(weight) else (text, 1.0)


def short_names(names: Sequence[str], *, taken: Collection[str] = ()) -> list[str]:
    """Return a short name for each component, as metrics and settings have it; numbered where one
    comes again or is `taken`.

    >>> short_names(["right", "my.pkg:style", "rewards/file.py:style", "dist/right", "trl.py"])
    ['right', 'style', 'style_2', 'right_2', 'trl']
    """
    used, result = set(taken), []
    for name in names:
        short = name.rpartition(":")[2].rpartition("/")[2].removesuffix(".py") or "component"
        number, unique = 2, short
        while unique in used:
            unique, number = f"{short}_{number}", number + 1
        used.add(unique)
        result.append(unique)
    return result


def default_component(setting: str) -> Any:
    """A field with the component, or components, that the built-in plugins name for a setting."""

    def named() -> Any:
        from rlx.plugins.defaults import DEFAULTS

        kind = RewardConfig if setting == "rewards" else ComponentConfig
        components = [kind(name=name) for name in DEFAULTS[setting]]
        return components if setting in ("rewards", "trackers") else components[0]

    return Field(default_factory=named)


def as_list(value: Any) -> Any:
    return value if isinstance(value, (list, tuple)) else [value]


def stale_correction() -> str:
    """The correction that the built-in plugins name for rollouts older than the weights."""
    from rlx.plugins.defaults import STALE_CORRECTION

    return STALE_CORRECTION
