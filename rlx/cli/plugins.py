"""`rlx plugins`: list, show, check, new.

`list` reads metadata and source text; it imports no plugin. `show` imports the one that it shows.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from rlx.cli.main import COMMANDS
from rlx.cli.plugin_list import (
    command_rows,
    component_lines,
    component_row,
    hook_rows,
    plugin_table,
)
from rlx.core.component import KINDS, kind_of, singular
from rlx.core.plugins import PluginSystem

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
    """List components, hook plugins and commands. Imports no plugin unless --load is given."""
    system = PluginSystem.load(disable=no_plugin or (), hooks=load, rlxfile=not no_rlxfile)
    kinds = KINDS if kind is None else (kind_of(kind),)
    components = [
        component_row(system, entry) for k in kinds for entry in system.registry.entries(k)
    ]
    hooks = hook_rows(system, loaded=load) if kind is None else []
    commands = command_rows(system, COMMANDS) if kind is None else []
    if as_json:
        everything = {"components": components, "hooks": hooks, "commands": commands}
        typer.echo(json.dumps(everything, indent=2))
        return
    _console.print(component_lines(components, _console.width))
    for what, rows in (("hook plugin", hooks), ("command", commands)):
        if rows:
            _console.print()
            _console.print(plugin_table(what, rows))
    if hooks and not load:
        _console.print("what hook plugins register: rlx plugins list --load", style="dim")
    word = "KIND" if kind is None else singular(kind)
    _console.print(f"next: rlx plugins show {word} NAME", style="dim")


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
    """Run the conformance kit on what a distribution offers; load its hooks and commands."""
    from rlx.cli.scaffold import command, selection
    from rlx.testing.package import component_reports

    failed = checked = skipped = 0
    way = "rlx plugins list --load"
    for report in component_reports(distribution):
        if report.kind in KINDS:
            way = f"rlx {command(report.kind)} {selection(report.kind, report.name)}"
        failed += bool(report.violations)
        checked += report.checked
        skipped += not report.checked
        mark = Text("ok  ", style="green") if report.checked else Text("skip", style="yellow")
        if report.violations:
            mark = Text("FAIL", style="bold red")
        _console.print(mark, Text(report.title), Text(report.note, style="dim"))
        for violation in report.violations:
            _console.print(Text(_indented(str(violation))))
    unchecked = f", {skipped} not checked" if skipped else ""
    _console.print(f"{checked} checked, {failed} failed{unchecked}")
    if failed:
        _console.print(f"next: repair it, and rlx plugins check {distribution}", style="dim")
        raise typer.Exit(1)
    _console.print(f"next: {way}", style="dim")


@app.command()
def new(
    kind: KindArgument,
    name: Annotated[str, typer.Argument(help="Name of the new component.", metavar="NAME")],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="Folder in which the package is written.")
    ] = Path(),
) -> None:
    """Write an installable package with one component: typed module, conformance test, README."""
    from rlx.cli.scaffold import command, selection, write_package

    folder = write_package(kind, name, output)
    _console.print(f"wrote {folder}/")
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            _console.print(f"  {path.relative_to(folder)}", style="dim")
    place = shlex.quote(str(folder))
    steps = [f"pip install -e {place}", f"pytest {place}", f"rlx plugins check {folder.name}"]
    steps.append(f"rlx {command(kind)} {selection(kind, name)} --steps 3")
    _console.print(f"next: {' && '.join(steps)}", style="dim", soft_wrap=True)


def _indented(text: str) -> str:
    return "\n".join(f"     {line}" for line in text.splitlines())
