"""`rlx watch RUN`: a run in a line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import rlx
from rlx_watch.progress import read

app = typer.Typer()


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="Run folder, for example runs/embedded-group_norm-1")],
) -> None:
    """Say how far a run is and when it was last better."""
    metrics = run / "metrics.jsonl"
    if not metrics.is_file():
        raise rlx.UsageError(
            f"{run} holds no metrics", where="RUN", fix="rlx runs list shows what there is"
        )
    progress = read(metrics)
    typer.echo(
        f"{run.name}: step {progress.step}, mean reward {progress.reward:.3f}, "
        f"best {progress.best:.3f} at step {progress.best_step}"
    )
