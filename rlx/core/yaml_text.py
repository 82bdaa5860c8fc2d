"""YAML as rlx reads and writes it: the scalars of YAML 1.2, line numbers, no duplicate keys.

PyYAML follows YAML 1.1, where `1e-4` is text, `no` is false, `1:30` is 90 and `010` is 8.
A learning rate that turns into text and a label column `no` that turns into false are exactly the
mistakes that a configuration should not make, so numbers and booleans are read as JSON has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlx.core.errors import UsageError

_FLOAT = re.compile(
    r"^[-+]?(\.[0-9]+|[0-9]+\.[0-9]*)([eE][-+]?[0-9]+)?$|^[-+]?[0-9]+[eE][-+]?[0-9]+$"
    r"|^[-+]?\.inf$|^\.nan$"
)
_INT = re.compile(r"^[-+]?(0|[1-9][0-9]*|0x[0-9a-fA-F]+)$")
_BOOL = re.compile(r"^(true|True|TRUE|false|False|FALSE)$")
_BREAK = re.compile(r"[\n\r\x85\u2028\u2029]")
_NULL = re.compile(r"^(~|null|Null|NULL|)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with YAML 1.2 scalars."""


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes every text that YAML 1.1 *or* 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if _BREAK.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)
_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("null", _NULL, ["~", "n", "N", ""]),
    ("bool", _BOOL, list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _pattern, _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))


def parse_value(text: str) -> Any:
    """Read one value (`1e-4`, `true`, `[a, b]`, plain text) as it would stand in a YAML file.

    Text that is no YAML (`{prompt}: x`) is taken as it is.
    """
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        return text
    return text if value is None and _NULL.match(text.strip()) is None else value


def parse_file(text: str, name: str) -> tuple[Any, dict[tuple[str, ...], int]]:
    """Read a YAML document and the line (from 1) of each of its mapping keys.

    Returns:
        The value, and `{("learner", "lr"): 12, …}`.

    Raises:
        UsageError: the text is no YAML, or a mapping holds a key twice.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines = dict(_lines(node, (), name)) if node is not None else {}
        value = loader.construct_document(node) if node is not None else None
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UsageError(
            f"{name} is not valid YAML: {error.problem or error.context}",
            where=f"{name}{line}",
            fix="check the indentation and the quotes near that line",
        ) from None
    finally:
        loader.dispose()
    return value, lines


def _lines(
    node: yaml.Node, path: tuple[str, ...], name: str
) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield (*path, str(index)), item.start_mark.line + 1
            yield from _lines(item, (*path, str(index)), name)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        word, line = str(key.value), key.start_mark.line + 1
        if word in seen:
            raise UsageError(
                f"{'.'.join((*path, word))} stands twice in {name}",
                where=f"{name}:{seen[word]} and {name}:{line}",
                fix="keep one of the two",
            )
        seen[word] = line
        yield (*path, word), line
        yield from _lines(value, (*path, word), name)


def dump_value(value: Any) -> str:
    """Write a value on one line, so that `parse_value` reads the same value back."""
    text = yaml.dump(
        value,
        Dumper=_Dumper,
        default_flow_style=True,
        allow_unicode=True,
        width=2**31,
        sort_keys=False,
    )
    return text.removesuffix("\n...\n").removesuffix("\n")


def dump_tree(tree: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """Write nested mappings as block YAML; `comments` maps dotted keys to end-of-line comments."""
    rows = list(_rows(tree, "", "", comments or {}))
    width = min(48, max((len(text) for text, comment in rows if comment), default=0))
    return "".join(
        f"{text:<{width}}  # {comment}\n" if comment else f"{text}\n" for text, comment in rows
    )


def _rows(
    value: Any, key: str, indent: str, comments: Mapping[str, str]
) -> Iterator[tuple[str, str | None]]:
    for word, item in value.items():
        here = f"{key}.{word}" if key else str(word)
        label = f"{indent}{dump_value(str(word))}:"
        if isinstance(item, Mapping) and item:
            yield label, None
            yield from _rows(item, here, indent + "  ", comments)
        elif isinstance(item, list) and item and all(isinstance(p, Mapping) and p for p in item):
            yield label, None
            for index, part in enumerate(item):
                rows = list(_rows(part, f"{here}.{index}", indent + "    ", comments))
                first, comment = rows[0]
                yield f"{indent}  - {first[len(indent) + 4 :]}", comment
                yield from rows[1:]
        else:
            yield f"{label} {dump_value(item)}", comments.get(here)
