"""How a command shows that it works: a bar on a terminal, else a line now and then, on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlx.cli.output import console


@contextmanager
def shown() -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """Ways to say what is waited for and how far it is, on stderr: a bar on a terminal."""
    out = console(stderr=True)
    started = time.monotonic()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=out,
        transient=True,
        disable=not out.is_terminal,
    )
    task = bar.add_task("", total=None)
    last = [started]

    def status(text: str) -> None:
        bar.update(task, description=text)
        if not out.is_terminal:
            out.print(f"[{time.monotonic() - started:6.1f} s] {text}")

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        now = time.monotonic()
        if not out.is_terminal and now - last[0] > 10:
            last[0] = now
            out.print(f"[{now - started:6.1f} s] {done} of {total} tasks")

    with bar:
        yield status, progress
