"""`rlx plan --simulate`: step time, idle shares and staleness for given counts; starts nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.table import Table

from rlx.cli.output import console
from rlx.core.config import RunConfig
from rlx.core.errors import UsageError

if TYPE_CHECKING:
    from rlx.core.simulation.run import Prediction, Shape
    from rlx.core.simulation.timings import Timings


def print_simulation(
    config: RunConfig, *, recorded: Path | None, timings: Path | None, counts: Sequence[str]
) -> None:
    """Print a table: the run's own staleness and its neighbours', for every pair of counts.

    Raises:
        UsageError: no timings, or counts that are none.
    """
    from rlx.core.simulation.run import Shape, simulate

    if (recorded is None) == (timings is None):
        raise UsageError(
            "a simulation needs to know how long things take",
            where="--simulate",
            fix="`--recorded RUN`, a run with rollout.max_staleness 0 and "
            "logging.rollouts=complete; or `--timings FILE` (docs/cluster.md)",
        )
    known = _from_run(recorded) if recorded is not None else _from_file(timings)
    rollout = config.rollout
    base = Shape(
        groups=rollout.groups,
        group_size=rollout.group_size,
        engines=rollout.engines,
        ranks=config.learner.ranks,
        max_staleness=rollout.max_staleness,
        partial_rollout=rollout.partial_rollout,
        max_in_flight=rollout.max_in_flight,
        max_running=rollout.max_running,
    )
    shapes = [
        dataclasses.replace(base, engines=engines, ranks=ranks, max_staleness=staleness)
        for engines, ranks in ([_counts(text) for text in counts] or [(base.engines, base.ranks)])
        for staleness in sorted({0, 1, rollout.max_staleness})
    ]
    out = console()
    out.print(_table([(shape, simulate(known, shape)) for shape in shapes]))
    out.print("simulated, not measured; docs/cluster.md says what the model leaves out")


def _from_run(folder: Path) -> Timings:
    from rlx.core.simulation.calibration import calibrate

    return calibrate(folder)[1]


def _from_file(path: Path | None) -> Timings:
    from rlx.core.simulation.timings import Timings
    from rlx.core.yaml_text import parse_file

    assert path is not None
    try:
        tree, _ = parse_file(path.read_text(encoding="utf-8"), str(path))
        return Timings.model_validate(tree)
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error}", where="--timings") from None
    except ValidationError as error:
        wrong = "; ".join(
            f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
        )
        raise UsageError(f"{path}: {wrong}", where="--timings", fix="docs/cluster.md") from None


def _counts(text: str) -> tuple[int, int]:
    engines, _, ranks = text.partition("x")
    if not (engines.isdigit() and ranks.isdigit() and int(engines) and int(ranks)):
        raise UsageError(
            f"{text!r} is not a number of engines and of ranks",
            where="--counts",
            fix="`--counts 4x2`: four engines, two learner ranks",
        )
    return int(engines), int(ranks)


def _table(rows: Sequence[tuple[Shape, Prediction]]) -> Table:
    table = Table(
        "engines",
        "ranks",
        "max_staleness",
        "step",
        "rollouts/s",
        "engines idle",
        "learner idle",
        "staleness",
        title="simulation",
        title_justify="left",
        title_style="bold",
        box=None,
    )
    for shape, found in rows:
        table.add_row(
            str(shape.engines),
            str(shape.ranks),
            str(shape.max_staleness),
            f"{found.step:.2f} s",
            f"{found.rollouts_per_second:,.1f}",
            f"{found.engine_idle:.0%}",
            f"{found.learner_idle:.0%}",
            f"{found.staleness:.2f}",
        )
    return table
