"""What commands have in common when they print: errors, warnings, the next step."""

from __future__ import annotations

import traceback
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from rlx.core.errors import RAISED_BY, RlxError, UsageError

_RLX = str(Path(__file__).resolve().parent.parent)
_COMMAND_LINE = (str(Path(__file__).with_name("main.py")), str(Path(typer.__file__).parent))
"""What every command is called through."""


def console(*, stderr: bool = False) -> Console:
    """A console that neither colours numbers nor reads markup in users' text."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def print_usage_error(error: UsageError) -> None:
    """What is wrong, where it was set, what to write instead; on stderr, no traceback."""
    out = console(stderr=True)
    out.print(Text("error: ", style="bold red") + Text(error.what))
    for label, text in (("where", error.where), ("fix", error.fix)):
        if text:
            indented = text.replace("\n", "\n         ")
            out.print(Text(f"  {label:<6} ", style="bold") + Text(indented))


def print_warning(what: str, fix: str | None = None) -> None:
    """One warning on stderr."""
    line = Text("warning: ", style="bold yellow") + Text(what)
    console(stderr=True).print(line + Text(f" ({fix})" if fix else "", style="dim"))


def print_notice(what: str) -> None:
    """One line on stderr that is good to know."""
    console(stderr=True).print(Text("note: ", style="bold") + Text(what))


def show_warning(message: Warning | str, category: type[Warning], *_: object, **__: object) -> None:
    """How the command line shows Python's warnings: without file, line and source."""
    print_warning(str(message))


def print_failure(error: BaseException) -> None:
    """A failure that is no mistake in the input.

    An error that rlx raised is its message, with the traceback of the user's code below it; any
    other error is a bug, a library's or a plugin's, and shows its traceback below the command.
    """
    out = console(stderr=True)
    if not isinstance(error, RlxError):
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith(RAISED_BY)]
        above = (_RLX, *_COMMAND_LINE) if notes else _COMMAND_LINE
        who = f" ({notes[0]})" if notes else ""
        out.print(_traceback_below(error, above))
        out.print(Text("error: ", style="bold red") + Text(f"{type(error).__name__}: {error}{who}"))
        return
    cause = error.__cause__
    if cause is not None and not isinstance(cause, RlxError):
        out.print(_traceback_below(cause, (_RLX, *_COMMAND_LINE)))
    out.print(Text("error: ", style="bold red") + Text(str(error)))


def next_step(*commands: str, stderr: bool = False) -> None:
    """The last line of a command's output: what one would do now."""
    label = Text("next: ", style="dim")
    console(stderr=stderr).print(label + Text("   ".join(commands), style="cyan"))


def _traceback_below(error: BaseException, folders: tuple[str, ...]) -> str:
    """The traceback from the first frame that lies in none of the folders; all of it when every
    frame does."""
    shown = traceback.TracebackException.from_exception(error)
    frames = list(shown.stack)
    while frames and frames[0].filename.startswith(folders):
        frames = frames[1:]
    shown.stack = traceback.StackSummary.from_list(frames or list(shown.stack))
    return "".join(shown.format()).rstrip()
