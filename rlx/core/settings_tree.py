"""The tree that layers of settings are written into, guided by the types of `RunConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.core.config import (
    ComponentConfig,
    Part,
    RewardConfig,
    RunConfig,
    short_names,
    split_weight,
)
from rlx.core.errors import did_you_mean
from rlx.core.settings_schema import field_at, nearest_key, options_of, section_of, with_hint
from rlx.core.yaml_text import dump_value, parse_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One wrong setting."""

    key: str
    origin: str
    text: str
    fix: str | None = None


class Tree:
    """All values of a `RunConfig` in canonical form (`estimator: {name, params}`), with origins.

    Mistakes are collected in `problems`, so that one run of the command reports all of them.
    """

    def __init__(self) -> None:
        self.values: dict[str, Any] = RunConfig().model_dump()
        self.origins: dict[str, str] = {}
        self.problems: list[Problem] = []

    def value(self, key: str) -> Any:
        """The value at a dotted key, None where there is none."""
        node: Any = self.values
        for word in key.split("."):
            if isinstance(node, Mapping):
                node = node.get(word)
            elif isinstance(node, list) and word.isdigit() and int(word) < len(node):
                node = node[int(word)]
            else:
                return None
        return node

    def assign_mapping(self, layer: Mapping[str, Any], origin: Callable[[str], str]) -> None:
        """Write a partial tree; `origin` says where a dotted key of it stands."""
        for key, value in layer.items():
            self._assign(RunConfig, self.values, "", str(key), value, origin)

    def assign(self, key: str, value: Any, origin: str) -> None:
        """Write one value at a dotted key."""
        self._assign(RunConfig, self.values, "", key, value, lambda _: origin)

    def assign_text(self, key: str, text: str, origin: str) -> None:
        """Write one value given as text: YAML, but kept as it is where the setting is a text."""
        field, value = field_at(key), parse_value(text)
        section, is_list = section_of(field) if field else (None, False)
        if section and issubclass(section, ComponentConfig) and not is_list:
            keep = not isinstance(value, Mapping)
        else:
            keep = field is not None and value is not None and str in options_of(field.annotation)
        self.assign(key, text if keep else value, origin)

    def _assign(
        self,
        part: type[Part],
        node: dict[str, Any],
        above: str,
        key: str,
        value: Any,
        origin: Callable[[str], str],
    ) -> None:
        word, _, rest = key.partition(".")
        here = f"{above}{word}"
        field = part.model_fields.get(word)
        if field is None:
            self._unknown(f"{above}{key}", origin(f"{above}{key}"))
            return
        section, is_list = section_of(field)
        if section is None:
            self._assign_leaf(node, word, here, rest, value, origin)
        elif issubclass(section, ComponentConfig):
            assign = self._assign_list if is_list else self._assign_component
            assign(section, node[word], here, rest, value, origin)
        elif is_list:
            self._assign_entries(section, node, word, here, rest, value, origin)
        elif rest:
            self._assign(section, node[word], f"{here}.", rest, value, origin)
        elif isinstance(value, Mapping):
            for inner, item in value.items():
                self._assign(section, node[word], f"{here}.", str(inner), item, origin)
        else:
            keys = ", ".join(f"{here}.{name}" for name in list(section.model_fields)[:4])
            self._problem(here, origin(here), f"is a section with keys of its own ({keys} …)")

    def _assign_leaf(
        self,
        node: dict[str, Any],
        word: str,
        here: str,
        rest: str,
        value: Any,
        origin: Callable[[str], str],
    ) -> None:
        if rest:
            if not isinstance(node[word], Mapping):
                self._problem(f"{here}.{rest}", origin(here), f"{here} holds a single value")
                return
            node[word] = {**node[word], rest: value}  # free keys: a chat template's variables
            self.origins[f"{here}.{rest}"] = origin(f"{here}.{rest}")
            return
        node[word] = value
        self._forget(here)
        self.origins[here] = origin(here)

    def _assign_component(
        self,
        kind: type[ComponentConfig],
        slot: dict[str, Any],
        here: str,
        rest: str,
        value: Any,
        origin: Callable[[str], str],
    ) -> None:
        if rest:
            word = rest.partition(".")[0]
            key = rest if word in kind.model_fields else f"params.{rest}"
            if key == "params" and isinstance(value, Mapping):
                for name, item in value.items():
                    self._write(slot, f"params.{name}", item, here, origin)
            else:
                self._write(slot, key, value, here, origin)
        elif isinstance(value, str):
            self._name_component(kind, slot, here, value, origin)
        elif isinstance(value, Mapping):
            if "name" in value:
                slot.clear()
                slot.update(_blank(kind))
                self._forget(here)
            own = {key: item for key, item in value.items() if key in kind.model_fields}
            inline = {key: item for key, item in value.items() if key not in own}
            params = own.pop("params", {})
            if not isinstance(params, Mapping):
                self._problem(f"{here}.params", origin(f"{here}.params"), "is a mapping")
                params = {}
            for key, item in own.items():
                self._write(slot, str(key), item, here, origin)
            for key, item in {**inline, **params}.items():
                self._write(slot, f"params.{key}", item, here, origin)
        else:
            expected = "a component's name, or a mapping with `name` and `params`"
            self._problem(here, origin(here), f"is {expected}; got {dump_value(value)}")

    def _name_component(
        self,
        kind: type[ComponentConfig],
        slot: dict[str, Any],
        here: str,
        text: str,
        origin: Callable[[str], str],
    ) -> None:
        weighted = issubclass(kind, RewardConfig)
        name, weight = split_weight(text) if weighted else (text, 1.0)
        if name != slot["name"]:
            slot.clear()
            slot.update(_blank(kind))
            self._forget(here)
        self._write(slot, "name", name, here, origin)
        if weighted:
            self._write(slot, "weight", weight, here, origin)

    def _write(
        self,
        slot: dict[str, Any],
        key: str,
        value: Any,
        here: str,
        origin: Callable[[str], str],
    ) -> None:
        """Write into a component's slot; parameters may be nested mappings."""
        *path, last = key.split(".")
        node = slot
        for word in path:
            inner = node.get(word)
            node[word] = dict(inner) if isinstance(inner, Mapping) else {}
            node = node[word]
        node[last] = value
        full = f"{here}.{key}"
        self._forget(full)
        self.origins[full] = origin(full)

    def _assign_list(
        self,
        kind: type[ComponentConfig],
        items: list[dict[str, Any]],
        here: str,
        rest: str,
        value: Any,
        origin: Callable[[str], str],
    ) -> None:
        if rest:
            found = _find_item(items, rest)
            if found is None:
                names = short_names([str(item["name"]) for item in items])
                listed = ", ".join(f"{index} ({name})" for index, name in enumerate(names))
                hint = did_you_mean(rest.partition(".")[0], names)
                text = f"no such entry; there are {listed or 'none'}"
                self._problem(f"{here}.{rest}", origin(f"{here}.{rest}"), with_hint(text, hint))
            else:
                index, rest = found
                self._assign_component(kind, items[index], f"{here}.{index}", rest, value, origin)
            return
        self._forget(here)
        self.origins[here] = origin(here)
        items.clear()
        for index, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if item is None:
                continue
            items.append(_blank(kind))
            self._assign_component(kind, items[-1], f"{here}.{index}", "", item, origin)

    def _assign_entries(
        self,
        kind: type[Part],
        node: dict[str, Any],
        word: str,
        here: str,
        rest: str,
        value: Any,
        origin: Callable[[str], str],
    ) -> None:
        """A list of sections: replaced as a whole (a text stands for the first key), or one key of
        one entry (`0.name`)."""
        if rest:
            place, _, key = rest.partition(".")
            if place.isdigit() and int(place) < len(node[word]):
                entry = node[word][int(place)]
                self._write_entry(kind, entry, f"{here}.{place}", {key: value}, origin)
            else:
                text = f"no such entry; {here} has {len(node[word])}, counted from 0"
                self._problem(f"{here}.{rest}", origin(here), text)
            return
        node[word] = []
        self._forget(here)
        self.origins[here] = origin(here)
        first = next(iter(kind.model_fields))
        for number, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if item is not None:
                node[word].append({})
                given = {first: item} if isinstance(item, str) else item
                self._write_entry(kind, node[word][-1], f"{here}.{number}", given, origin)

    def _write_entry(
        self,
        kind: type[Part],
        entry: dict[str, Any],
        here: str,
        value: Any,
        origin: Callable[[str], str],
    ) -> None:
        if not isinstance(value, Mapping):
            text = f"is a mapping of settings; got {dump_value(value)}"
            self._problem(here, origin(here), text)
            return
        for key, item in value.items():
            full = f"{here}.{key}"
            if key in kind.model_fields:
                entry[key] = item
                self.origins[full] = origin(full)
            else:
                hint = did_you_mean(str(key), kind.model_fields)
                self._problem(full, origin(full), with_hint("no such setting", hint))

    def _forget(self, key: str) -> None:
        for name in [name for name in self.origins if name.startswith(f"{key}.")]:
            del self.origins[name]

    def _unknown(self, key: str, origin: str) -> None:
        hint = nearest_key(key)
        self._problem(key, origin, with_hint("no such setting", hint and f"did you mean '{hint}'?"))

    def _problem(self, key: str, origin: str, text: str) -> None:
        self.problems.append(Problem(key=key, origin=origin, text=text))


def _blank(kind: type[ComponentConfig]) -> dict[str, Any]:
    return kind(name="").model_dump()


def _find_item(items: list[dict[str, Any]], rest: str) -> tuple[int, str] | None:
    """Index and remaining key of `0.weight` or `style.weight`; names may hold dots. The short
    one that metrics show will do: `style.weight` of `my.pkg:style`."""
    word, _, below = rest.partition(".")
    if word.isdigit():
        return (int(word), below) if int(word) < len(items) else None
    names = [str(item["name"]) for item in items]
    for candidates in (names, short_names(names)):
        for index, name in enumerate(candidates):
            if rest == name or rest.startswith(f"{name}."):
                return index, rest[len(name) + 1 :]
    return None
