"""Keys of nested values that pydantic would pass over in silence."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import AliasChoices, BaseModel
from pydantic.fields import FieldInfo


def stray_keys(given: Any, taken: Any, place: str = "") -> Iterator[tuple[str, str, list[str]]]:
    """Yield what of `given` did not become part of `taken`: (place, key, what there is).

    Models that take further keys on purpose (`extra="allow"`), and those that look at their input
    before pydantic does, are left alone.
    """
    if isinstance(given, Mapping):
        known = _known(taken)
        if known is None:
            return
        for key, value in given.items():
            if key in known:
                yield from stray_keys(value, known[key], f"{place}.{key}")
            else:
                yield place, str(key), list(map(str, known))
    elif _is_list(given) and _is_list(taken) and len(given) == len(taken):
        for index, (one, other) in enumerate(zip(given, taken, strict=True)):
            yield from stray_keys(one, other, f"{place}.{index}")


def _known(taken: Any) -> dict[Any, Any] | None:
    """Return the keys that a value could be given by, with what became of them; None: any."""
    if isinstance(taken, BaseModel):
        return _of_model(taken)
    if dataclasses.is_dataclass(taken) and not isinstance(taken, type):
        return {field.name: getattr(taken, field.name) for field in dataclasses.fields(taken)}
    return dict(taken) if isinstance(taken, Mapping) else None


def _of_model(taken: BaseModel) -> dict[Any, Any] | None:
    model = type(taken)
    validators = model.__pydantic_decorators__.model_validators.values()
    if model.model_config.get("extra") == "allow" or any(
        one.info.mode != "after" for one in validators
    ):
        return None
    known: dict[Any, Any] = {}
    for name, field in model.model_fields.items():
        aliases = _aliases(field)
        if aliases is None:
            return None
        known |= dict.fromkeys([name, *aliases], getattr(taken, name))
    return known


def _aliases(field: FieldInfo) -> list[str] | None:
    """Return a field's other names; None where it is found by a path."""
    alias = field.validation_alias or field.alias
    choices = alias.choices if isinstance(alias, AliasChoices) else [alias] if alias else []
    names = [choice for choice in choices if isinstance(choice, str)]
    return names if len(names) == len(choices) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))
