"""Rows become tasks: column mapping, system prompt, template, chat template, token ids, length.

A task is built when it is asked for, so a million rows cost no more than their table. Up to
`EAGER_ROWS` rows the prompts' lengths are checked when the data is loaded; in larger data the
prompts that are too long are met, counted and passed over while the run goes (`BoundSampler`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from rlx.core.config import DataConfig, SourceConfig
from rlx.core.data import Rows, read_rows
from rlx.core.data_checks import check_columns, check_prompts
from rlx.core.errors import UsageError
from rlx.core.mixture import TaskMixture, check_probabilities
from rlx.core.prompts import Prompts
from rlx.core.rollouts import Task

EAGER_ROWS = 20_000
_BATCH = 512
_CHARACTERS_PER_TOKEN = 256
"""Longer than any token of a usual vocabulary: a prompt this many times the limit is too long,
which is told without the minutes that a tokenizer takes over a hundred megabytes."""


class Tasks(Sequence[Task]):
    """Tasks by number, built on access from their row (nothing is kept)."""

    max_prompt_tokens: int | None
    """Set while longer prompts may still be met; None once lengths have been checked."""
    source: str
    """Name of the data set, in task ids and metrics."""

    def __init__(
        self,
        rows: Rows,
        prompts: Prompts,
        config: DataConfig,
        *,
        source: str,
        kept: np.ndarray | None,
        max_prompt_tokens: int | None,
        longest_prompt: int | None = None,
    ) -> None:
        self._rows = rows
        self._prompts = prompts
        self._prompt = config.prompt
        self._label = config.label if config.label in set(rows.columns) else None
        self.source = source
        self._kept = kept
        """[P] int64, row numbers of the tasks; None: all rows."""
        self.max_prompt_tokens = max_prompt_tokens
        self.longest_prompt = longest_prompt
        """Tokens; None while lengths are not checked."""

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
            id=f"{self.source}/{number}",
            prompt=prompt,
            tokens=self._prompts.encode([prompt], number)[0],
            label=row.get(self._label) if self._label else None,
            source=self.source,
            columns=row,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data set of a run."""

    name: str
    """In task ids and metrics."""
    tasks: Tasks
    rows: int
    """Rows in the data (after `max_samples`)."""
    probability: float | None = None
    """Share of the tasks drawn; None: in proportion to the rows."""

    @property
    def skipped_too_long(self) -> int:
        """Rows left out because their prompt is too long; 0 while lengths are not checked."""
        return self.rows - len(self.tasks)

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "name": self.name,
            "rows": self.rows,
            "tasks": len(self.tasks),
            "probability": self.probability,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSet:
    """The tasks of a run."""

    tasks: Sequence[Task]
    """Of all sources; a `TaskMixture` when there are several."""
    sources: tuple[Source, ...]
    max_prompt_tokens: int
    lengths_checked: bool = True
    """False: `tasks` may still hold prompts that are too long; the sampler passes over them."""

    @property
    def rows(self) -> int:
        """Rows in the data (after `max_samples`)."""
        return sum(source.rows for source in self.sources)

    @property
    def skipped_too_long(self) -> int:
        """Rows left out because their prompt is too long; 0 while `lengths_checked` is False."""
        return sum(source.skipped_too_long for source in self.sources)

    @property
    def longest_prompt(self) -> int | None:
        """Tokens; None where that is not known."""
        lengths = [source.tasks.longest_prompt for source in self.sources]
        known = [length for length in lengths if length is not None]
        return max(known) if known and len(known) == len(lengths) else None


def load_tasks(
    config: DataConfig,
    *,
    tokenizer: Any,
    max_prompt_tokens: int,
    needs_label: str | None,
    all_lengths: bool = False,
) -> TaskSet:
    """Load the data and check it.

    Args:
        config: where the rows are, which columns count, how a prompt is made.
        tokenizer: a transformers tokenizer (called, and asked for `apply_chat_template`).
        max_prompt_tokens: longest prompt that the context leaves room for; `config`'s own bound
            applies too.
        needs_label: name of a reward that compares with the label, or None.
        all_lengths: check every prompt's length, however many there are.

    Raises UsageError for whatever in the data would end or silently bend the run.
    """
    limit = min(max_prompt_tokens, config.max_prompt_tokens or max_prompt_tokens)
    if not config.sources:
        only = _load_source(config, tokenizer, limit, needs_label, all_lengths=all_lengths)
        return TaskSet(
            tasks=only.tasks,
            sources=(only,),
            max_prompt_tokens=limit,
            lengths_checked=only.tasks.max_prompt_tokens is None,
        )
    default = DataConfig.model_fields["path"].default
    if config.path != default:
        raise UsageError(
            f"data.path ({config.path}) and data.sources are two answers to one question",
            where="data.sources",
            fix="list all data sets in data.sources, or `--set data.sources=[]`",
        )
    sources = load_sources(
        config,
        config.sources,
        tokenizer=tokenizer,
        max_prompt_tokens=limit,
        needs_label=needs_label,
        key="data.sources",
        all_lengths=all_lengths,
    )
    check_probabilities({source.name: source.probability for source in sources})
    mixture = TaskMixture(
        {source.name: source.tasks for source in sources},
        {source.name: source.probability for source in sources if source.probability} or None,
    )
    return TaskSet(
        tasks=mixture,
        sources=sources,
        max_prompt_tokens=limit,
        lengths_checked=mixture.max_prompt_tokens is None,
    )


def load_sources(
    common: DataConfig,
    sources: Sequence[SourceConfig],
    *,
    tokenizer: Any,
    max_prompt_tokens: int,
    needs_label: str | None,
    key: str,
    all_lengths: bool = False,
) -> tuple[Source, ...]:
    """Load several data sets.

    Args:
        key: the setting that lists them, for errors.
        all_lengths: check every prompt's length, however many there are.
    """
    loaded: list[Source] = []
    taken: dict[str, str] = {}
    for number, item in enumerate(sources):
        config = common.of(item)
        try:
            source = _load_source(
                config, tokenizer, max_prompt_tokens, needs_label, all_lengths=all_lengths
            )
        except UsageError as error:
            place = (error.where or "data").replace("data.", f"{key}.{number}.", 1)
            named = Path(item.path).name in error.what
            what = error.what if named else f"{item.path}: {error.what}"
            raise UsageError(what, where=place, fix=error.fix) from error.__cause__
        name = item.name or source.name
        if name in taken:
            raise UsageError(
                f"two data sets have the name {name!r}: {taken[name]} and {item.path}",
                where=f"{key}.{number}.name",
                fix="give each a `name` of its own",
            )
        taken[name] = item.path
        source.tasks.source = name
        loaded.append(dataclasses.replace(source, name=name, probability=item.probability))
    return tuple(loaded)


def _load_source(
    config: DataConfig,
    tokenizer: Any,
    limit: int,
    needs_label: str | None,
    *,
    all_lengths: bool = False,
) -> Source:
    rows, name = read_rows(config)
    check_columns(rows, config, needs_label)
    prompts = Prompts(tokenizer, config, rows[0])
    check_prompts(rows, config.prompt)
    kept: np.ndarray | None = None
    longest: int | None = None
    checked = all_lengths or len(rows) <= EAGER_ROWS or config.too_long == "error"
    if checked:
        kept, longest = _fitting_rows(rows, prompts, config, limit)
    else:
        _check_any_fits(rows, prompts, config, limit)
    tasks = Tasks(
        rows,
        prompts,
        config,
        source=name,
        kept=kept,
        max_prompt_tokens=None if checked else limit,
        longest_prompt=longest,
    )
    return Source(name=name, tasks=tasks, rows=len(rows))


def _batches(
    rows: Rows, prompts: Prompts, column: str, limit: int
) -> Iterator[tuple[int, list[int]]]:
    """Yield the first row number and the prompt lengths [tokens] of each batch of rows.

    Of a prompt that is beyond the limit by its characters alone, the length is an estimate.
    """
    most = limit * _CHARACTERS_PER_TOKEN
    for start in range(0, len(rows), _BATCH):
        numbers = range(start, min(start + _BATCH, len(rows)))
        texts = []
        for number in numbers:
            row = rows[number]
            texts.append(prompts.text(prompts.build(row[column], row, number), number))
        encoded = iter(prompts.encode_texts([text for text in texts if len(text) <= most]))
        yield (
            start,
            [
                len(next(encoded)) if len(text) <= most else len(text) // _CHARACTERS_PER_TOKEN + 1
                for text in texts
            ],
        )


def _fitting_rows(
    rows: Rows, prompts: Prompts, config: DataConfig, limit: int
) -> tuple[np.ndarray | None, int]:
    """Row numbers [P] of the prompts within the limit, None when all are; and their most tokens."""
    kept: list[int] = []
    longest = 0
    shortest = limit
    for start, lengths in _batches(rows, prompts, config.prompt, limit):
        for number, length in enumerate(lengths, start):
            if length <= limit:
                kept.append(number)
                longest = max(longest, length)
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
    return (None if len(kept) == len(rows) else np.asarray(kept, dtype=np.int64)), longest


def _check_any_fits(rows: Rows, prompts: Prompts, config: DataConfig, limit: int) -> None:
    shortest = None
    for _, lengths in _batches(rows, prompts, config.prompt, limit):
        shortest = min(lengths) if shortest is None else min(shortest, *lengths)
        if shortest <= limit:
            return
    raise _none_fits(len(rows), limit, shortest or 0)


def _none_fits(rows: int, limit: int, shortest: int) -> UsageError:
    return UsageError(
        f"{'the only prompt is' if rows == 1 else f'all {rows} prompts are'} too long: "
        f"the shortest has {shortest} tokens or more, {limit} fit",
        where="data.max_prompt_tokens (or the model's context less rollout.max_new_tokens)",
        fix="a larger rollout.context_length, fewer max_new_tokens, or shorter prompts",
    )
