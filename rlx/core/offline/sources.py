"""Data sets read, tokenised and cut to length, with a count of everything that was left out.

Legend: R rows kept, S sequences, N trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlx.core.config import DataConfig, OfflineConfig
from rlx.core.data import Rows, read_rows
from rlx.core.errors import UsageError
from rlx.core.offline.build import RowBuilder
from rlx.core.offline.drafts import encode
from rlx.core.offline.examples import Example, Examples
from rlx.core.offline.mismatched import mismatched
from rlx.core.offline.needs import Needs
from rlx.core.offline.rows import RowBatch

_BATCH = 256
_EMBEDDED = "rlx.embedded.offline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One data set, ready to train on."""

    name: str
    rows: RowBatch
    others: RowBatch | None
    """Row for row, the prompt with another row's answer; where the objective requires it."""
    read: int
    """Rows in the data (after `max_samples`)."""
    dropped: Mapping[str, int]
    """Reason → rows that are left out."""
    cut: int = 0
    """Sequences that were cut to length."""
    rewritten: int = 0
    """Answers within kept conversations that can't be trained."""
    empty: int = 0
    """Answers within kept conversations in which nothing is said."""
    probability: float | None = None

    def describe(self) -> dict[str, Any]:
        """For the manifest."""
        return {
            "name": self.name,
            "rows": self.read,
            "kept": self.rows.rollout_count,
            "dropped": dict(self.dropped),
            "cut": self.cut,
            "answers_rewritten": self.rewritten,
            "answers_empty": self.empty,
            "tokens": int(self.rows.lengths.sum()),
            "trained_tokens": self.rows.action_count,
            "probability": self.probability,
        }

    def complaints(self) -> list[str]:
        """What was left out or changed, a line each."""
        lines = [
            f"{count:,} of {self.read:,} rows left out: {reason}"
            for reason, count in sorted(self.dropped.items())
        ]
        if self.cut:
            lines.append(f"{self.cut:,} sequences cut to the longest length")
        if self.rewritten:
            lines.append(f"{self.rewritten:,} answers not trained: the chat template rewrites them")
        if self.empty:
            lines.append(f"{self.empty:,} answers not trained: they are empty")
        return [f"{self.name}: {line}" for line in lines]


def load_source(
    data: DataConfig,
    needs: Needs,
    offline: OfflineConfig,
    *,
    tokenizer: Any,
    max_length: int,
    pad: int | None,
    where: str = "data",
    status: Callable[[str], None] | None = None,
) -> Source:
    """Read one data set.

    Args:
        data: where the rows are, and which columns count.
        max_length: most tokens of a sequence.
        pad: token that a score is never read at.
        where: setting that names the data, for errors.
        status: told how far it is, from time to time.

    Raises:
        UsageError: a missing column, a value of the wrong type, or no row that can be trained on.
    """
    embedded = data.path == "embedded"
    if embedded:
        data = data.model_copy(update={"path": f"{_EMBEDDED}:{needs.data}"})
    rows, name = read_rows(data)
    name = "embedded" if embedded else name
    examples = Examples(
        needs, offline, data, tokenizer=tokenizer, columns=rows.columns, example=rows[0]
    )
    build = RowBuilder(needs, data, max_length=max_length, pad=pad)
    for start in range(0, len(rows), _BATCH):
        if status is not None and start and start % (64 * _BATCH) == 0:
            status(f"reading {name}: {start:,} of {len(rows):,} rows")
        made = list(_made(rows, examples, start, build.dropped))
        drafts = [draft for _, example in made for draft in example.drafts]
        build.add(made, encode(drafts, tokenizer))
    if not len(build):
        reasons = "; ".join(f"{count:,} {reason}" for reason, count in build.dropped.items())
        raise UsageError(
            f"none of the {len(rows):,} rows of {name} can be trained on: {reasons}",
            where=where,
            fix="other columns, or a larger offline.max_length",
        )
    batch = build.finish(name)
    others = mismatched(batch, max_length) if "kl_baseline" in needs.requires else None
    return Source(
        name=name,
        rows=batch,
        others=others,
        read=len(rows),
        dropped=dict(build.dropped),
        cut=build.cut,
        rewritten=build.rewritten,
        empty=build.empty,
    )


def _made(
    rows: Rows, examples: Examples, start: int, dropped: Counter[str]
) -> Iterator[tuple[int, Example]]:
    for number in range(start, min(start + _BATCH, len(rows))):
        made = examples.make(rows[number], number)
        if isinstance(made, str):
            dropped[made] += 1
        else:
            yield number, made
