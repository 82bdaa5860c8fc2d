"""Rows become tasks: column mapping, system prompt, template, chat template, token ids, length.

A task is built when it is asked for, so a million rows cost no more than their table. Up to
`EAGER_ROWS` rows the prompts' lengths are checked when the data is loaded; in larger data the
prompts that are too long are met, counted and passed over while the run goes (`BoundSampler`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from rlx.core.config import DataConfig
from rlx.core.data import ArrowRows, Rows, read_rows
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.prompts import Prompts, as_messages
from rlx.core.rollouts import Task

EAGER_ROWS = 20_000
_BATCH = 512


class Tasks(Sequence[Task]):
    """Tasks by number, built on access from their row (nothing is kept)."""

    max_prompt_tokens: int | None
    """Set while longer prompts may still be met; None once lengths have been checked."""

    def __init__(
        self,
        rows: Rows,
        prompts: Prompts,
        config: DataConfig,
        *,
        source: str,
        kept: np.ndarray | None,
        max_prompt_tokens: int | None,
    ) -> None:
        self._rows = rows
        self._prompts = prompts
        self._prompt = config.prompt
        self._label = config.label if config.label in set(rows.columns) else None
        self._source = source
        self._kept = kept
        """[P] int64, row numbers of the tasks; None: all rows."""
        self.max_prompt_tokens = max_prompt_tokens

    def __len__(self) -> int:
        return len(self._rows) if self._kept is None else len(self._kept)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...
    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"task {index} of {len(self)}")
        index %= len(self)
        number = index if self._kept is None else int(self._kept[index])
        row = self._rows[number]
        prompt = self._prompts.build(row[self._prompt], row, number)
        return Task(
            id=f"{self._source}/{number}",
            prompt=prompt,
            tokens=self._prompts.encode([prompt], number)[0],
            label=row.get(self._label) if self._label else None,
            source=self._source,
            columns=row,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of a run."""

    tasks: Sequence[Task]
    skipped_too_long: int
    """Rows left out because their prompt is too long; 0 while `lengths_checked` is False."""
    source: str
    """Name of the data in task ids and metrics."""
    rows: int
    """Rows in the data (after `max_samples`)."""
    max_prompt_tokens: int
    lengths_checked: bool = True
    """False: `tasks` may still hold prompts that are too long; the sampler passes over them."""


def load_tasks(
    config: DataConfig, *, tokenizer: Any, max_prompt_tokens: int, needs_label: str | None
) -> TaskSet:
    """Load the data and check it.

    Args:
        config: where the rows are, which columns count, how a prompt is made.
        tokenizer: a transformers tokenizer (called, and asked for `apply_chat_template`).
        max_prompt_tokens: longest prompt that the context leaves room for; `config`'s own bound
            applies too.
        needs_label: name of a reward that compares with the label, or None.

    Raises UsageError for whatever in the data would end or silently bend the run.
    """
    rows, source = read_rows(config)
    _check_columns(rows, config, needs_label)
    prompts = Prompts(tokenizer, config, rows[0])
    _check_prompts(rows, config.prompt)
    limit = min(max_prompt_tokens, config.max_prompt_tokens or max_prompt_tokens)
    kept: np.ndarray | None = None
    checked = len(rows) <= EAGER_ROWS or config.too_long == "error"
    if checked:
        kept = _fitting_rows(rows, prompts, config, limit)
    else:
        _check_any_fits(rows, prompts, config, limit)
    tasks = Tasks(
        rows,
        prompts,
        config,
        source=source,
        kept=kept,
        max_prompt_tokens=None if checked else limit,
    )
    return TaskSet(
        tasks=tasks,
        skipped_too_long=len(rows) - len(tasks),
        source=source,
        rows=len(rows),
        max_prompt_tokens=limit,
        lengths_checked=checked,
    )


def _check_columns(rows: Rows, config: DataConfig, needs_label: str | None) -> None:
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


def _check_prompts(rows: Rows, column: str) -> None:
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
        text = values.cast(pa.large_string())
        bad = pc.equal(pc.binary_length(pc.utf8_trim_whitespace(text)), 0)
    elif _holds_messages(kind):
        bad = pc.equal(pc.list_value_length(values), 0)
    elif pa.types.is_null(kind):
        return 0
    else:
        raise UsageError(
            f"column {column!r} can't be a prompt: it holds {kind}",
            where="data.prompt",
            fix='a column with text, or with messages: [{"role": "user", "content": "..."}]',
        )
    row = pc.index(pc.fill_null(bad, True), True).as_py()
    return None if row < 0 else int(row)


def _holds_messages(kind: Any) -> bool:
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    return pa.types.is_struct(item) and {"role", "content"} <= {field.name for field in item}


def _batches(rows: Rows, prompts: Prompts, column: str) -> Iterator[tuple[int, list[int]]]:
    """Yield the first row number and the prompt lengths of each batch of rows."""
    for start in range(0, len(rows), _BATCH):
        numbers = range(start, min(start + _BATCH, len(rows)))
        built = []
        for number in numbers:
            row = rows[number]
            built.append(prompts.build(row[column], row, number))
        yield start, [len(tokens) for tokens in prompts.encode(built, start)]


def _fitting_rows(
    rows: Rows, prompts: Prompts, config: DataConfig, limit: int
) -> np.ndarray | None:
    """Row numbers [P] of the prompts within the limit; None when all are."""
    kept: list[int] = []
    shortest = limit
    for start, lengths in _batches(rows, prompts, config.prompt):
        for number, length in enumerate(lengths, start):
            if length <= limit:
                kept.append(number)
            elif config.too_long == "error":
                raise UsageError(
                    f"the prompt of row {number} has {length} tokens, {limit} fit "
                    "(rows count from 0)",
                    where="data.too_long: error",
                    fix="data.too_long=skip, a larger rollout.context_length, or shorter prompts",
                )
            elif not kept:
                shortest = length if shortest == limit else min(shortest, length)
    if not kept:
        raise _none_fits(len(rows), limit, shortest)
    return None if len(kept) == len(rows) else np.asarray(kept, dtype=np.int64)


def _check_any_fits(rows: Rows, prompts: Prompts, config: DataConfig, limit: int) -> None:
    shortest = None
    for _, lengths in _batches(rows, prompts, config.prompt):
        shortest = min(lengths) if shortest is None else min(shortest, *lengths)
        if shortest <= limit:
            return
    raise _none_fits(len(rows), limit, shortest or 0)


def _none_fits(rows: int, limit: int, shortest: int) -> UsageError:
    return UsageError(
        f"all {rows} prompts are too long: the shortest has {shortest} tokens, {limit} fit",
        where="data.max_prompt_tokens (or the model's context less rollout.max_new_tokens)",
        fix="a larger rollout.context_length, fewer max_new_tokens, or shorter prompts",
    )
