"""What `rlx plugins show` prints of one component."""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlx.cli.scaffold import command, selection
from rlx.core.component import singular, tags_of
from rlx.core.importing import source_files
from rlx.core.parameters import parameter_fields, parameters_model, shown_value, type_name
from rlx.core.references import ComponentRef

_NAMED = ("Formula", "Source", "Use")
_STOP = r"(?:\n\s*\n|\n(?=\w[\w ]*:(?:\s|$))|\Z)"


class _Schema(GenerateJsonSchema):
    """Leaves open what JSON can't express (a callable as a parameter), instead of failing."""

    def emit_warning(self, kind: Any, detail: str) -> None:
        """A default without a JSON form is left out; nobody needs to hear of it."""

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> dict[str, Any]:
        return {}


def parameter_schema(ref: ComponentRef) -> dict[str, Any]:
    """Return the JSON schema of a component's parameters."""
    model = parameters_model(ref.load(), label=ref.name)
    schema = model.model_json_schema(by_alias=True, schema_generator=_Schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def component_page(ref: ComponentRef, console: Console) -> None:
    """Print a component: description, formula, source, tags, parameters, origin."""
    obj = ref.load()
    text = inspect.getdoc(obj) or ""
    head = Text(f"{singular(ref.kind)} ", style="cyan") + Text(ref.name, style="bold")
    console.print(head)
    if description := docstring_summary(text):
        console.print(Text(description))
    if not docstring_section(text, "Formula") and (about := _module_text(obj)):
        console.print()
        console.print(Text(reflowed(about)))
        console.print()
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(ratio=1)
    for label, value in _facts(ref, obj, text):
        facts.add_row(label, Text(value))
    console.print(facts)
    console.print()
    fields = parameter_fields(parameters_model(obj, label=ref.name))
    way = f"next: rlx {command(ref.kind)} {selection(ref.kind, ref.name)}"
    if not fields:
        console.print("no parameters")
        console.print(Text(way, style="dim"))
        return
    table = Table("parameter", "type", "default", "", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.overflow = "fold"  # nothing of a default may be missing
    for name, field in fields.items():
        default = "required" if field.is_required() else shown_value(field.default)
        kind = type_name(field.annotation) + _limits(field.metadata)
        cells = (Text(kind), Text(default), Text(field.description or ""))
        table.add_row(Text(name, style="bold"), *cells)
    console.print(table)
    example = f"--set {_key(ref)}.{next(iter(fields))}=VALUE"
    console.print(Text(f"{way} {example}", style="dim"))


def _facts(ref: ComponentRef, obj: Any, text: str) -> list[tuple[str, str]]:
    tags = tags_of(obj)
    named = [(label.lower(), docstring_section(text, label)) for label in _NAMED]
    files = source_files(obj, ref.target)
    origin = f"{ref.distribution} {ref.version or ''}".strip() if ref.distribution else None
    rows: list[tuple[str, str | None]] = [
        *named,
        ("requires", ", ".join(sorted(tags.requires)) or None),
        ("scope", tags.scope if ref.kind == "rewards" else None),
        ("needs label", "yes" if tags.needs_label else None),
        ("aggregation", tags.aggregation),
        *((key, str(value)) for key, value in tags.extra.items()),
        ("from", origin),
        ("target", ref.target),
        ("file", str(files[-1]) if files else None),
    ]
    return [(label, value) for label, value in rows if value]


def reflowed(text: str) -> str:
    """Return a text with its paragraphs on one line each; indented ones stay as they are."""
    paragraphs = re.split(r"\n\s*\n", text)
    return "\n\n".join(
        part if re.search(r"^\s", part, re.MULTILINE) else " ".join(part.split())
        for part in paragraphs
    )


def docstring_section(text: str, label: str) -> str | None:
    """Return the paragraph `Label: …` of a docstring, on one line."""
    match = re.search(rf"^{label}:\s+(.*?){_STOP}", text, re.MULTILINE | re.DOTALL)
    return " ".join(match.group(1).split()) if match else None


def docstring_summary(text: str) -> str:
    """Return a docstring up to its first named section, which stands after a blank line."""
    end = re.search(r"\n\s*\n\w[\w ]*:(\s|$)", text)
    return (text[: end.start()] if end else text).strip()


def _module_text(obj: Any) -> str:
    """Return the docstring of the module: by convention formula and source stand there."""
    module = sys.modules.get(getattr(obj, "__module__", None) or "")
    return inspect.getdoc(module) or "" if module is not None else ""


def _limits(metadata: list[Any]) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    found = [
        f"{sign} {getattr(item, name)}"
        for item in metadata
        for name, sign in signs.items()
        if getattr(item, name, None) is not None
    ]
    return f" ({', '.join(found)})" if found else ""


def _key(ref: ComponentRef) -> str:
    """Return the place of a component in the configuration."""
    listed = {"rewards": "rewards.0", "trackers": "trackers.0"}
    return listed.get(ref.kind, singular(ref.kind))
