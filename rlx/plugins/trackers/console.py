"""The terminal: a live panel on a TTY, one plain line a step elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rlx.core.run import METRICS_NAME, Run

_BARS = "▁▂▃▄▅▆▇█"
_PHASES = ("rollout", "reward", "score", "update", "publish", "eval", "checkpoint")
_PRIMARY = {"reward/mean": "mean reward", "train/loss": "loss"}
"""What a run is about: the first of these that it has, and its name in plots."""
_SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "train/loss", "{:.4f}"),
    ("accuracy", "train/accuracy", "{:.1%}"),
    ("margin", "train/reward_margin", "{:.3f}"),
    ("± reward", "reward/std", "{:.3f}"),
    ("length", "rollout/length_mean", "{:.1f}"),
    ("truncated", "rollout/truncated_rate", "{:.1%}"),
    ("entropy", "policy/entropy", "{:.3f}"),
    ("grad norm", "policy/grad_norm", "{:.3g}"),
    ("grad norm", "train/grad_norm", "{:.3g}"),
    ("clip rate", "policy/clip_rate", "{:.2%}"),
    ("KL to ref", "policy/kl_ref", "{:.4f}"),
    ("|Δ log-prob|", "mismatch/logprob_abs_mean", "{:.1e}"),
    ("tokens/s", "throughput/tokens_per_s", "{:,.0f}"),
    ("rollouts/s", "throughput/rollouts_per_s", "{:,.1f}"),
    ("step", "time/step", "{:.2f} s"),
)


class Console:
    """Shows progress, and the learning curve at the end.

    Args:
        live: True draws a panel that is redrawn in place, False prints lines; unset: a panel when
            standard output is a terminal.
    """

    def __init__(self, *, live: bool | None = None) -> None:
        self._console = RichConsole(highlight=False)
        self._wants_live = self._console.is_terminal if live is None else live
        self._live: Live | None = None
        self._run: Run | None = None
        self._primary = "reward/mean"
        self._curve: list[tuple[int, float]] = []
        self._metrics: Mapping[str, float] = {}
        self._evaluation = ""
        self._sample: Mapping[str, Any] | None = None
        self._status = ""
        self._status_since = self._started = time.monotonic()
        self._breakpoint_hook = sys.breakpointhook

    def start(self, run: Run) -> None:
        self._run = run
        self._primary = "train/loss" if run.objective else "reward/mean"
        self._curve = _earlier(run.folder / METRICS_NAME, self._primary)
        self._print(f"run {run.name}: {_headline(run)}")
        if self._wants_live:
            self._live = Live(self, console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
            # A debugger can't share the terminal with a panel that redraws itself.
            sys.breakpointhook = self._break

    def status(self, text: str) -> None:
        self._status, self._status_since = text, time.monotonic()
        if self._live is None:
            self._print(f"[{time.monotonic() - self._started:6.1f} s] {text}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._status = ""
        if self._primary in metrics:
            self._metrics = metrics
            self._curve.append((step, metrics[self._primary]))
        self._evaluation = _evaluation(metrics) or self._evaluation
        if self._live is None:
            self._print(_line(step, self._total(), metrics))

    def log_samples(self, step: int, records: Sequence[Mapping[str, Any]]) -> None:
        self._sample = records[0] if records else None

    def close(self, error: BaseException | None = None) -> None:
        self._stop_live()
        known = [(step, value) for step, value in self._curve if math.isfinite(value)]
        if len(known) > 1:
            width, name = min(self._console.width, 80), _PRIMARY[self._primary]
            self._print(learning_curve(known, width=width, name=name))

    def __rich__(self) -> Panel:
        """The panel's present content (called by rich at each refresh)."""
        parts: list[Any] = [self._progress()]
        if self._metrics:
            parts += [_numbers(self._metrics), _phase_times(self._metrics)]
            label = f"{_PRIMARY[self._primary].split()[-1]:<8}"
            parts.append(Text(label + sparkline([value for _, value in self._curve], 60)))
        if self._evaluation:
            parts.append(Text(self._evaluation))
        if self._sample is not None:
            parts.append(_sample_text(self._sample))
        if self._status:
            waited = time.monotonic() - self._status_since
            parts.append(Spinner("dots", text=f"{self._status} ({waited:.0f} s)"))
        name = self._run.name if self._run else ""
        return Panel(Group(*parts), title=f"rlx · {name}", border_style="cyan")

    def _progress(self) -> Progress:
        done = self._curve[-1][0] if self._curve else 0
        left = self._metrics.get("time/step", 0.0) * (self._total() - done)
        progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn(f"{left:.0f} s left" if left else ""),
        )
        progress.add_task("step", total=self._total(), completed=done)
        return progress

    def _total(self) -> int:
        return self._run.config.steps if self._run else 0

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
            sys.breakpointhook = self._breakpoint_hook

    def _break(self, *args: Any, **kwargs: Any) -> Any:
        self._stop_live()
        return self._breakpoint_hook(*args, **kwargs)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as block characters, scaled to their range.

    >>> sparkline([0.0, 0.5, 1.0], 3)
    '▁▅█'
    """
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, high = min(shown), max(shown)
    span = (high - low) or 1.0
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1))] for value in shown)


def learning_curve(
    points: Sequence[tuple[int, float]],
    *,
    width: int,
    height: int = 14,
    name: str = "mean reward",
) -> str:
    """A plain-text plot of the mean reward (or what `name` says) over steps."""
    import plotext

    plotext.clear_figure()
    plotext.theme("clear")
    plotext.plot_size(width, height)
    plotext.plot([step for step, _ in points], [reward for _, reward in points], marker="braille")
    plotext.title(f"{name} by step")
    return plotext.uncolorize(plotext.build())


def _line(step: int, total: int, metrics: Mapping[str, float]) -> str:
    shown = [f"step {step:>{len(str(total))}}/{total}"]
    for label, name, form in _SHOWN:
        if name in metrics and label not in ("± reward", "rollouts/s"):
            shown.append(f"{label} {form.format(metrics[name])}")
    phases = [
        f"{name} {metrics[f'time/{name}']:.2f}"
        for name in _PHASES
        if metrics.get(f"time/{name}", 0.0) >= 0.005
    ]
    if found := _evaluation(metrics):
        shown.append(found)
    return "  ".join(shown) + (f" ({', '.join(phases)})" if phases else "")


def _evaluation(metrics: Mapping[str, float]) -> str:
    """`eval gsm8k 0.312, aime 0.050`: the means (offline: losses) of an evaluation; empty when
    there is none."""
    found = [
        f"{name.removeprefix('eval/').removesuffix('/mean')} {value:.3f}"
        for name, value in metrics.items()
        if name.startswith("eval/") and name.endswith(("/mean", "/loss", "/accuracy"))
    ]
    return "eval " + ", ".join(found) if found else ""


def _numbers(metrics: Mapping[str, float]) -> Table:
    table = Table.grid(padding=(0, 2))
    cells = [(label, form.format(metrics[name])) for label, name, form in _SHOWN if name in metrics]
    for start in range(0, len(cells), 4):
        row: list[Text] = []
        for label, value in cells[start : start + 4]:
            row += [Text(label, style="dim"), Text(value, style="bold")]
        table.add_row(*row)
    return table


def _phase_times(metrics: Mapping[str, float]) -> Text:
    times = {name: metrics.get(f"time/{name}", 0.0) for name in _PHASES}
    total = sum(times.values()) or 1.0
    shown = [f"{name} {value / total:.0%}" for name, value in times.items() if value]
    return Text("time    " + "  ".join(shown), style="dim")


def _sample_text(sample: Mapping[str, Any]) -> Text:
    prompt = str(sample["prompt"]).replace("\n", "⏎")
    response = str(sample["response"]).replace("\n", "⏎")
    return Text(
        f"sample  {prompt[-60:]} → {response[:60]}  ({sample['reward']:.2f})", style="italic"
    )


def _headline(run: Run) -> str:
    config = run.config
    if run.objective:
        return (
            f"{config.model}, {run.objective}, {config.offline.batch_size} rows a step, "
            f"{config.learner.ranks} rank{'s' if config.learner.ranks > 1 else ''} on "
            f"{config.runtime.kind}"
        )
    rewards = " + ".join(
        reward.name if reward.weight == 1 else f"{reward.weight:g}·{reward.name}"
        for reward in config.rewards
    )
    return (
        f"{config.model}, {config.estimator.name} × {config.loss.name}, reward {rewards}, "
        f"{config.rollout.groups} × {config.rollout.group_size} rollouts a step, "
        f"{config.rollout.engine} on {config.runtime.kind}"
    )


def _earlier(path: Path, name: str) -> list[tuple[int, float]]:
    """Steps and values of a metric in the file that a resumed run goes on with."""
    if not path.is_file():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines() if line]
    return [(r["step"], r[name]) for r in records if r.get(name) is not None]
