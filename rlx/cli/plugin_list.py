"""What `rlx plugins list` shows: components, hook plugins and commands, as rows and as tables.

Metadata and source text are read; nothing of a plugin is imported here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len, set_cell_size
from rich.table import Table
from rich.text import Text

from rlx.core.discovery import COMMAND_GROUP
from rlx.core.peek import plain_problem, summary
from rlx.core.plugins import PluginSystem

if TYPE_CHECKING:
    from rlx.core.registry import Entry

_LONGEST = 40
"""Columns; a longer cell is cut, so that there is room for the rest."""


def component_row(system: PluginSystem, entry: Entry) -> dict[str, Any]:
    """Return what there is to say of a component."""
    conflict = bool(system.registry.conflicts(entry.kind, entry.name))
    own = system.registry.find(entry.kind, entry.name) if not conflict else None
    shadowed = conflict or own is not entry
    lazy = isinstance(entry.target, str)
    return {
        "kind": entry.kind,
        "name": f"{entry.provider.distribution}/{entry.name}" if shadowed else entry.name,
        "distribution": entry.provider.distribution,
        "version": entry.provider.version,
        "builtin": entry.provider.builtin,
        "conflict": conflict,
        "target": entry.target if lazy else None,
        "summary": summary(entry.target) if lazy else _first_line(entry.target),
    }


def hook_rows(system: PluginSystem, *, loaded: bool) -> list[dict[str, Any]]:
    """Return the hook plugins; with `loaded`, what came of importing them."""
    broken = {(item.provider.distribution, item.entry_point): item for item in system.broken}
    rows = []
    for distribution in system.distributions:
        provider = distribution.provider
        for point in distribution.in_group("rlx"):
            failure = broken.get((provider.distribution, point.name))
            problem = (
                failure.error.splitlines()[-1]
                if failure
                else plain_problem(point.value.partition(":")[0].strip())
            )
            state = "broken" if problem else "loaded" if loaded else "installed"
            rows.append(
                {
                    "name": point.name,
                    "distribution": provider.distribution,
                    "version": provider.version,
                    "module": point.value,
                    "state": state,
                    "error": problem,
                }
            )
    return [*rows, *_rlxfile_row(system, loaded=loaded)]


def _rlxfile_row(system: PluginSystem, *, loaded: bool) -> list[dict[str, Any]]:
    path = system.rlxfile
    if path is None:
        return []
    failures = [item.error for item in system.broken if item.target == str(path)]
    problem = failures[0].splitlines()[-1] if failures else plain_problem(str(path))
    return [
        {
            "name": "rlxfile",
            "distribution": "(working directory)",
            "version": None,
            "module": str(path),
            "state": "broken" if problem else "loaded" if loaded else "present",
            "error": problem,
        }
    ]


def command_rows(system: PluginSystem, own: Collection[str]) -> list[dict[str, Any]]:
    """Return the commands that plugins bring.

    Args:
        own: the names of rlx's commands, which no plugin takes over.
    """
    offers = [
        (distribution.provider, point)
        for distribution in system.distributions
        for point in distribution.in_group(COMMAND_GROUP)
    ]
    names = [point.name for _, point in offers]
    rows = []
    for provider, point in sorted(offers, key=lambda offer: offer[1].name):
        problem = plain_problem(point.value.partition(":")[0].strip())
        if point.name in own:
            problem = "not used: rlx has a command of this name"
        elif names.count(point.name) > 1:
            problem = "several distributions offer this name"
        rows.append(
            {
                "name": point.name,
                "distribution": provider.distribution,
                "version": provider.version,
                "module": point.value,
                "state": "broken" if problem else "installed",
                "error": problem,
            }
        )
    return rows


def component_lines(rows: list[dict[str, Any]], width: int) -> Text:
    """Return one line per component; where room is short, it is the summary that is cut.

    A `rich.table.Table` of hundreds of rows takes four times as long.
    """
    cells = [("kind", "name", "from", "summary")]
    previous = None
    for row in rows:
        kind = "" if row["kind"] == previous else row["kind"]
        previous = row["kind"]
        origin = "rlx" if row["builtin"] else _origin(row)
        cells.append((kind, row["name"], origin, row["summary"] or ""))
    sizes = [min(max(cell_len(line[i]) for line in cells), _LONGEST) for i in range(3)]
    rest = max(width - sum(sizes) - 2 * len(sizes), 4)
    conflicts = {number for number, row in enumerate(rows, 1) if row["conflict"]}
    text = Text(no_wrap=True, overflow="ignore", end="")
    for number, (kind, name, origin, about) in enumerate(cells):
        head = "bold" if number == 0 else ""
        text.append(set_cell_size(kind, sizes[0]) + "  ", head or "cyan")
        text.append(
            set_cell_size(name, sizes[1]) + "  ", "bold red" if number in conflicts else "bold"
        )
        text.append(set_cell_size(origin, sizes[2]) + "  ", head)
        cut = cell_len(about) > rest
        text.append(f"{set_cell_size(about, rest - 1)}…\n" if cut else f"{about}\n", head)
    return text


def plugin_table(what: str, rows: list[dict[str, Any]]) -> Table:
    """Return hook plugins or commands, with their state and what is wrong with them."""
    table = Table(what, "from", "state", "", box=None, pad_edge=False)
    for column in table.columns[:3]:
        column.no_wrap = True
    for row in rows:
        state = Text(row["state"], style="red" if row["error"] else "green")
        about = Text(row["error"] or row["module"], style="dim", overflow="fold")
        table.add_row(Text(row["name"], style="bold"), Text(_origin(row)), state, about)
    return table


def _origin(row: dict[str, Any]) -> str:
    return f"{row['distribution']} {row['version'] or ''}".strip()


def _first_line(obj: object) -> str | None:
    text = (getattr(obj, "__doc__", None) or "").strip()
    return text.splitlines()[0] if text else None
