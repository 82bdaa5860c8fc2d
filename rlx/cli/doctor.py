"""`rlx doctor`: is this machine fit for rlx, and if not, what to do."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rlx.cli.doctor_checks import CHECKS, Line
from rlx.cli.output import console, next_step

app = typer.Typer(rich_markup_mode="rich", pretty_exceptions_enable=False)
_DEEP = {
    "torch": "torch",
    "transformers": "from transformers import AutoModelForCausalLM",
    "deepspeed": "deepspeed",
    "ray": "ray",
    "vllm": "from vllm.v1.engine.llm_engine import LLMEngine",
}
"""Library → what is imported of it: the part that rlx uses, which is where broken builds show."""
_DEEP_SECONDS = 180
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@app.command()
def doctor(
    deep: Annotated[
        bool, typer.Option("--deep", help="Also import every library, each in its own process.")
    ] = False,
) -> None:
    """Check versions, devices, limits and known-bad combinations.

    Exits with 1 when something must be put right.
    """
    lines = [line for check in CHECKS for line in check()]
    if deep:
        lines += [_import(library) for library in _DEEP]
    table = Table(box=None, show_header=False, pad_edge=False)
    for line in lines:
        value = Text(line.value)
        if line.fix:
            value.append(f"\n→ {line.fix}", style="cyan")
        table.add_row(Text(line.level, style=_STYLES[line.level]), line.what, value)
    out = console()
    out.print(table)
    count = {level: sum(line.level == level for line in lines) for level in _STYLES}
    out.print(f"{count['ok']} ok, {count['warn']} to know, {count['fail']} to put right")
    if count["fail"]:
        next_step("put right what is marked fail", "rlx doctor")
        raise typer.Exit(1)
    next_step("rlx train" if deep else "rlx doctor --deep", "rlx plan")


def _import(library: str) -> Line:
    """Import a library in a process of its own."""
    from importlib.util import find_spec

    what = f"import {library}"
    if find_spec(library) is None:
        return Line(level="warn", what=what, value="not installed")
    target = _DEEP[library]
    code = target if " " in target else f"import {target}"
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", code],
            capture_output=True,
            text=True,
            timeout=_DEEP_SECONDS,
        )
    except subprocess.TimeoutExpired:
        value = f"not done after {_DEEP_SECONDS} s"
        return Line(level="fail", what=what, value=value, fix="look at the load of this machine")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        fix = f'`{sys.executable} -c "{code}"` shows all of it; reinstall {library}'
        return Line(level="fail", what=what, value=last, fix=fix)
    return Line(level="ok", what=what, value=f"{time.monotonic() - begin:.1f} s")
