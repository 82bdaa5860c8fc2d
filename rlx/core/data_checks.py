"""Whether rows can become tasks: columns are there, prompts are prompts, no label is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlx.core.config import DataConfig
from rlx.core.data import ArrowRows, Rows
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.prompts import as_messages

_PIECE = 1 << 13
"""Rows that are looked at together."""


def check_columns(rows: Rows, config: DataConfig, needs_label: str | None) -> None:
    """Prompt and label columns are there, and a reward that compares has a label in each row."""
    if config.prompt not in rows.columns:
        raise _missing_column("prompt", config.prompt, rows.columns)
    label = config.label
    if label is None or label not in rows.columns:
        if needs_label is not None and label is None:
            raise UsageError(
                f"the reward {needs_label!r} compares with a label, and data.label is null",
                where="data.label",
                fix=f"the name of a column: {', '.join(rows.columns)}",
            )
        # the default names a column that data for label-free rewards need not have
        if label is not None and (needs_label or label != DataConfig.model_fields["label"].default):
            raise _missing_column("label", label, rows.columns, needs_label)
        return
    if needs_label is not None and (row := rows.first_missing(label)) is not None:
        raise UsageError(
            f"row {row} has no label in column {label!r} (rows count from 0), "
            f"and the reward {needs_label!r} compares with it",
            where=f"data.path: {config.path}",
            fix="fill in or delete such rows",
        )


def _missing_column(
    role: str, name: str, columns: Sequence[str], reward: str | None = None
) -> UsageError:
    why = f" (the reward {reward!r} compares with it)" if reward else ""
    near = did_you_mean(name, columns)
    listing = f"--set data.{role}=COLUMN, one of: {', '.join(columns)}"
    return UsageError(
        f"the data has no column {name!r} for the {role}{why}",
        where=f"data.{role}",
        fix=f"{near} {listing}".strip(),
    )


def check_prompts(rows: Rows, column: str) -> None:
    """Every prompt is text with something in it, or chat messages."""
    number = (
        _first_bad_arrow(rows.table.column(column), column)
        if isinstance(rows, ArrowRows)
        else next((n for n, value in enumerate(rows.values(column)) if _is_bad(value)), None)
    )
    if number is None:
        return
    value = rows[number].get(column)
    what = "is empty" if not value or isinstance(value, str) else "is neither text nor messages"
    raise UsageError(
        f"the prompt of row {number} {what} (column {column!r}, rows count from 0)",
        where="data.prompt",
        fix='text, or messages: [{"role": "user", "content": "..."}]',
    )


def _is_bad(value: Any) -> bool:
    return not value.strip() if isinstance(value, str) else not as_messages(value)


def _first_bad_arrow(values: Any, column: str) -> int | None:
    """As `_is_bad` over a column, without a Python object per row."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = values.type
    if pa.types.is_dictionary(kind):
        values = values.cast(kind.value_type)
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):

        def bad(chunk: Any) -> Any:
            text = chunk.cast(pa.large_string())
            return pc.equal(pc.binary_length(pc.utf8_trim_whitespace(text)), 0)

    elif _holds_messages(kind):

        def bad(chunk: Any) -> Any:
            return pc.equal(pc.list_value_length(chunk), 0)

    elif pa.types.is_null(kind):
        return 0
    else:
        raise UsageError(
            f"column {column!r} can't be a prompt: it holds {kind}",
            where="data.prompt",
            fix='a column with text, or with messages: [{"role": "user", "content": "..."}]',
        )
    for start in range(0, len(values), _PIECE):  # a trimmed copy is made of each
        row = pc.index(pc.fill_null(bad(values.slice(start, _PIECE)), True), True).as_py()
        if row >= 0:
            return start + int(row)
    return None


def _holds_messages(kind: Any) -> bool:
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}
