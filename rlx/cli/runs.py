"""`rlx runs`: what is on disk. Reads files only; imports nothing heavy."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from rlx.cli.common_options import Root
from rlx.cli.rollout_view import LEGEND, rollout_panel
from rlx.core.errors import UsageError, did_you_mean
from rlx.core.messages import encodable
from rlx.core.run import CONFIG_NAME, MANIFEST_NAME, METRICS_NAME, is_finished
from rlx.core.yaml_text import parse_file

app = typer.Typer(
    help="Runs on disk: list them, look at one, read its rollouts.", no_args_is_help=True
)
_console = Console(highlight=False)
_EVALUATION = re.compile(r"eval/.+/(mean|pass@\d+|loss|accuracy|reward_margin)$")
_PRIMARY = {"reward/mean": "reward", "train/loss": "loss"}
"""What a run is about: the first of these that its metrics have."""
_KEY_METRICS = (
    "reward/mean",
    "reward/std",
    "train/loss",
    "train/accuracy",
    "train/reward_margin",
    "train/grad_norm",
    "rollout/length_mean",
    "rollout/truncated_rate",
    "policy/entropy",
    "policy/grad_norm",
    "policy/kl_ref",
    "mismatch/logprob_abs_mean",
    "throughput/rollouts_per_s",
    "throughput/tokens_per_s",
    "time/step",
)

RunArgument = Annotated[str, typer.Argument(help="Run folder, or its name under --root.")]


@app.command("list")
def list_runs(root: Root = Path("runs")) -> None:
    """List the runs under a folder with their last step and reward."""
    folders = sorted(path.parent for path in root.glob(f"*/{CONFIG_NAME}"))
    if not folders:
        _console.print(f"no runs under {root}/; start one with: rlx train")
        return
    table = Table("run", "state", "steps", "first → last", "model", "estimator × loss")
    for folder in folders:
        table.add_row(*_summary(folder))
    _console.print(table)
    _console.print(f"next: rlx runs show {folders[-1].name}", style="dim")


@app.command()
def show(run: RunArgument, root: Root = Path("runs")) -> None:
    """Show one run: what it was, how it went, what it left behind."""
    folder = find_run(run, root)
    records = list(_records(folder / METRICS_NAME))
    _console.print(_description(folder))
    if records:
        _console.print(_metrics_table(records))
        from rlx.plugins.trackers.console import learning_curve

        primary = _primary(records)
        points = [(r["step"], r[primary] or 0.0) for r in records if primary in r]
        if len(points) > 1:
            width, name = min(_console.width, 80), "mean reward" if "reward" in primary else "loss"
            _console.print(learning_curve(points, width=width, name=name), markup=False)
    checkpoints = sorted(path.name for path in (folder / "checkpoints").glob("step-*"))
    _console.print(f"checkpoints: {', '.join(checkpoints) or 'none'}")
    following = f"rlx runs rollouts {run}"
    if "objective" in _facts(folder):
        following = f"rlx train --model {folder / 'export'}"
    if not is_finished(folder):
        following = f"rlx {_command(folder)} -c {folder / CONFIG_NAME} --resume"
    _console.print(f"next: {following}", style="dim")


@app.command()
def rollouts(
    run: RunArgument,
    root: Root = Path("runs"),
    step: Annotated[int | None, typer.Option(help="Training step; unset: the last one.")] = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="How many to show.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines instead.")] = False,
) -> None:
    """Read sampled rollouts of a step turn by turn: who wrote what, rewards, advantages."""
    folder = find_run(run, root)
    steps = {
        int(path.stem.split("-")[1]): path for path in (folder / "rollouts").glob("step-*.jsonl")
    }
    if not steps:
        raise UsageError(
            f"{folder} holds no rollouts",
            where="logging.rollouts",
            fix="train with it on (default)",
        )
    chosen = max(steps) if step is None else step
    if chosen not in steps:
        raise UsageError(
            f"no rollouts of step {chosen}",
            where="--step",
            fix=f"choose one of {min(steps)} … {max(steps)}",
        )
    for number, record in enumerate(list(_records(steps[chosen]))[:count], 1):
        if as_json:
            print(encodable(json.dumps(record, ensure_ascii=False)))
        else:
            _console.print(_panel(record, f"{steps[chosen]}, line {number}"))
    if not as_json:
        _console.print(LEGEND, style="dim")
        _console.print(
            f"next: rlx runs rollouts {run} --step {min(steps)}  (the first)", style="dim"
        )


def _panel(record: Any, where: str) -> Panel:
    try:
        return rollout_panel(record)
    except KeyError as error:
        problem = f"has no field {error}"
    except (TypeError, ValueError, AttributeError) as error:
        problem = f"can't be shown: {error}"
    raise UsageError(
        f"{where}: the record {problem}",
        fix="`--json` prints records as they are; rlx and its plugins write whole ones",
    )


@app.command()
def verify(run: RunArgument, root: Root = Path("runs")) -> None:
    """Check what a run left on disk: checkpoints by their checksums, records line by line."""
    from rlx.cli.runs_verify import parts

    found = list(parts(find_run(run, root)))
    table = Table("part", "state", "what")
    for part in found:
        state = "[red]damaged[/]" if part.problems else "[green]whole[/]"
        table.add_row(part.name, state, Text("\n".join(part.problems[:5]) or part.whole))
    _console.print(table)
    if not any(part.problems for part in found):
        _console.print(f"next: rlx runs show {run}", style="dim")
        return
    whole = [one.name for one in found if "checkpoints/" in one.name and not one.problems]
    then = f"--resume goes on from {max(whole)}" if whole else "no checkpoint is whole: start again"
    _console.print(f"next: {then}", style="dim")
    raise typer.Exit(1)


@app.command()
def logs(
    run: RunArgument,
    root: Root = Path("runs"),
    worker: Annotated[
        list[str] | None,
        typer.Option("--worker", "-w", help="Only this one (driver, learner-0, …); repeatable."),
    ] = None,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, help="How many to show.")] = 50,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
) -> None:
    """Read what driver and workers said, in the order of time."""
    from rlx.cli.runs_logs import find_logs, last_lines, new_lines

    folder = find_run(run, root)
    chosen = worker or []
    coming = new_lines(folder, chosen) if follow else ()
    found = last_lines(find_logs(folder, chosen), lines)
    width = max((len(line.source) for line in found), default=0)
    for line in itertools.chain(found, coming):
        print(encodable(f"{line.source:<{width}} | {line.text}"), flush=follow)


def find_run(name: str, root: Path) -> Path:
    """The folder of a run given by path or by name; raises `UsageError` when there is none."""
    for folder in (Path(name), root / name):
        if (folder / CONFIG_NAME).is_file():
            return folder
    known = [path.parent.name for path in root.glob(f"*/{CONFIG_NAME}")]
    hint = did_you_mean(name, known) or "rlx runs list shows what there is"
    raise UsageError(f"there is no run '{name}' (looked here and under {root}/)", fix=hint)


def _summary(folder: Path) -> tuple[str, ...]:
    config = _config(folder)
    records = list(_records(folder / METRICS_NAME))
    primary = _primary(records)
    values = [record[primary] for record in records if primary in record]
    curve = f"{values[0]:.3f} → {values[-1]:.3f}" if values and None not in values else "–"
    state = "finished" if is_finished(folder) else "unfinished"
    algorithm = f"{_name(config.get('estimator'))} × {_name(config.get('loss'))}"
    algorithm = str(_facts(folder).get("objective", algorithm))
    steps = f"{len(values)}/{config.get('steps', '?')}"
    return folder.name, state, steps, curve, str(config.get("model", "?")), algorithm


def _primary(records: list[dict[str, Any]]) -> str:
    return next((name for name in _PRIMARY if any(name in one for one in records)), "reward/mean")


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST_NAME
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _facts(folder: Path) -> dict[str, Any]:
    """What the run noted of itself; an offline one the name of its objective."""
    return dict(_manifest(folder).get("facts") or {})


def _command(folder: Path) -> str:
    """The command that wrote the run."""
    words = [str(word) for word in _manifest(folder).get("command", [])[1:2]]
    return words[0] if words and "objective" in _facts(folder) else "train"


def _config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG_NAME
    return parse_file(path.read_text(encoding="utf-8"), str(path))[0] or {}


def _name(component: Any) -> str:
    return str(component.get("name")) if isinstance(component, Mapping) else str(component)


def _description(folder: Path) -> Table:
    manifest = _manifest(folder)
    name, state, steps, curve, model, algorithm = _summary(folder)
    versions = manifest.get("versions", {})
    table = Table.grid(padding=(0, 2))
    for label, value in (
        ("run", f"{name} ({state})"),
        ("folder", str(folder)),
        ("model", model),
        ("algorithm", algorithm),
        ("steps", steps),
        (_PRIMARY[_primary(list(_records(folder / METRICS_NAME)))], curve),
        ("created", str(manifest.get("created", "?"))),
        ("versions", ", ".join(f"{key} {value}" for key, value in versions.items())),
    ):
        table.add_row(Text(label, style="dim"), Text(value))
    return table


def _metrics_table(records: list[dict[str, Any]]) -> Table:
    table = Table("metric", "first", "last", "best" if len(records) > 1 else "")
    evaluated = {name for record in records for name in record if _EVALUATION.match(name)}
    for name in (*_KEY_METRICS, *sorted(evaluated)):
        values = [record[name] for record in records if record.get(name) is not None]
        if values:
            best = ""
            if name.endswith("loss") and name in evaluated:
                best = f"{min(values):.4g}"
            elif name == "reward/mean" or name in evaluated:
                best = f"{max(values):.4g}"
            table.add_row(name, f"{values[0]:.4g}", f"{values[-1]:.4g}", best)
    return table


def _records(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return  # a line that was cut off by a kill
