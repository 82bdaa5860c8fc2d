"""`rlx plugins`: list, show, check, new.

`list` reads metadata and source text; it imports no plugin. `show` imports the one that it shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlx.core.component import KINDS, kind_of, singular
from rlx.core.peek import plain_problem, summary
from rlx.core.plugins import PluginSystem

if TYPE_CHECKING:
    from rlx.core.registry import Entry

app = typer.Typer(
    help="Components and plugins: list them, look at one, check a package, write a new one.",
    no_args_is_help=True,
)
_PIPE_WIDTH = 160
"""Columns where nobody's terminal sets them: rows stay on one line for grep."""
_console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)


def _kinds(incomplete: str) -> list[str]:
    words = [*(singular(kind) for kind in KINDS), *KINDS]
    return [word for word in words if word.startswith(incomplete)]


def _names(ctx: typer.Context, incomplete: str) -> list[str]:
    names = PluginSystem.load(hooks=False).names(kind_of(ctx.params.get("kind") or ""))
    return [name for name in names if name.startswith(incomplete)]


KindArgument = Annotated[
    str,
    typer.Argument(
        help="Kind of component: estimator, loss, reward, …", autocompletion=_kinds, metavar="KIND"
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
DisableOption = Annotated[
    list[str] | None,
    typer.Option("--no-plugin", metavar="DIST", help="Leave a distribution out; repeatable."),
]


@app.command("list")
def list_plugins(
    kind: Annotated[
        str | None,
        typer.Argument(help="Only this kind.", autocompletion=_kinds, metavar="[KIND]"),
    ] = None,
    load: Annotated[
        bool,
        typer.Option("--load", help="Import hook plugins too, and list what they register."),
    ] = False,
    no_plugin: DisableOption = None,
    no_rlxfile: Annotated[
        bool, typer.Option("--no-rlxfile", help="Leave ./rlxfile.py out.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List components by kind, and hook plugins. Imports no plugin unless --load is given."""
    system = PluginSystem.load(disable=no_plugin or (), hooks=load, rlxfile=not no_rlxfile)
    kinds = KINDS if kind is None else (kind_of(kind),)
    components = [
        _component_row(system, entry) for k in kinds for entry in system.registry.entries(k)
    ]
    hooks = _hook_rows(system, loaded=load) if kind is None else []
    if as_json:
        typer.echo(json.dumps({"components": components, "hooks": hooks}, indent=2))
        return
    _console.print(_component_table(components))
    if hooks:
        _console.print(_hook_table(hooks))
        if not load:
            _console.print("what hook plugins register: rlx plugins list --load", style="dim")
    _console.print("next: rlx plugins show KIND NAME", style="dim")


@app.command()
def show(
    kind: KindArgument,
    name: Annotated[
        str,
        typer.Argument(
            help="Name, dist/name, pkg.mod:attr or file.py:attr.",
            autocompletion=_names,
            metavar="NAME",
        ),
    ],
    no_plugin: DisableOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The JSON schema of the parameters.")
    ] = False,
) -> None:
    """Show one component: what it computes, its parameters, where it comes from."""
    from rlx.cli.plugin_page import component_page, parameter_schema

    ref = PluginSystem.load(disable=no_plugin or ()).locate(kind, name, where="rlx plugins show")
    if as_json:
        typer.echo(json.dumps(parameter_schema(ref), indent=2))
    else:
        component_page(ref, _console)


@app.command()
def check(
    distribution: Annotated[
        str, typer.Argument(help="Installed distribution, for example rlx-foo.", metavar="DIST")
    ],
) -> None:
    """Run the conformance kit on every component that a distribution offers."""
    from rlx.testing.package import component_reports

    failed = total = 0
    for report in component_reports(distribution):
        total += 1
        failed += bool(report.violations)
        mark = Text("FAIL", style="bold red") if report.violations else Text("ok  ", style="green")
        _console.print(mark, Text(report.title), Text(report.note, style="dim"))
        for violation in report.violations:
            _console.print(Text(_indented(str(violation))))
    _console.print(f"{total} checked, {failed} failed")
    if failed:
        raise typer.Exit(1)


@app.command()
def new(
    kind: KindArgument,
    name: Annotated[str, typer.Argument(help="Name of the new component.", metavar="NAME")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder in which the package is written.")
    ] = Path(),
) -> None:
    """Write an installable package with one component: typed module, conformance test, README."""
    from rlx.cli.scaffold import selection, write_package

    folder = write_package(kind, name, output)
    _console.print(f"wrote {folder}/")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _console.print(f"  {path.relative_to(folder)}", style="dim")
    steps = [f"pip install -e {folder}", f"pytest {folder}", f"rlx plugins check {folder.name}"]
    steps.append(f"rlx train {selection(kind, name)} --steps 3")
    _console.print(f"next: {' && '.join(steps)}", style="dim", soft_wrap=True)


def _component_row(system: PluginSystem, entry: Entry) -> dict[str, Any]:
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


def _hook_rows(system: PluginSystem, *, loaded: bool) -> list[dict[str, Any]]:
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


def _component_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("kind", "name", "distribution", "version", "summary", box=None, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True
    table.columns[-1].overflow = "ellipsis"
    for column in table.columns[:2]:
        column.min_width = 12
    previous = None
    for row in rows:
        kind = row["kind"] if row["kind"] != previous else ""
        previous = row["kind"]
        name = Text(row["name"], style="bold red" if row["conflict"] else "bold")
        cells = [row["distribution"], row["version"] or "", row["summary"] or ""]
        table.add_row(Text(kind, style="cyan"), name, *(Text(cell) for cell in cells))
    return table


def _hook_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("hook plugin", "distribution", "version", "state", "", box=None, pad_edge=False)
    for row in rows:
        style = "bold red" if row["state"] == "broken" else "green"
        table.add_row(
            Text(row["name"], style="bold"),
            Text(row["distribution"]),
            Text(row["version"] or ""),
            Text(row["state"], style=style),
            Text(row["error"] or row["module"], style="dim"),
        )
    return table


def _first_line(obj: object) -> str | None:
    text = (getattr(obj, "__doc__", None) or "").strip()
    return text.splitlines()[0] if text else None


def _indented(text: str) -> str:
    return "\n".join(f"     {line}" for line in text.splitlines())
