"""`python -m benchmarks.chaos`: every experiment, and a table of what they came to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.chaos import __doc__ as description
from benchmarks.chaos import machine, workers
from benchmarks.chaos.driver import kill_driver
from benchmarks.chaos.runs import Budget, Outcome

_MARK = "<!-- chaos -->"
Experiment = Callable[[Path, Budget], Outcome]


def _engines(engine: str, staleness: int, seed: int, *, engines: int = 1) -> Experiment:
    return lambda folder, budget: workers.kill_engines(
        folder,
        budget,
        engine=engine,
        staleness=staleness,
        engines=engines,
        kills=5,
        steps=20,
        seed=seed,
    )


def _driver(runtime: str, seed: int, *, kills: int) -> Experiment:
    return lambda folder, budget: kill_driver(
        folder, budget, runtime=runtime, kills=kills, steps=10, seed=seed
    )


EXPERIMENTS: Mapping[str, Experiment] = {
    "engine-1": _engines("transformers", 0, 1),
    "engine-2": _engines("transformers", 0, 2),
    "engine-3": _engines("transformers", 0, 3),
    "engine-4": _engines("transformers", 1, 4),
    "engine-5": _engines("transformers", 1, 5),
    "engine-6": _engines("transformers", 1, 6),
    "engine-7": _engines("transformers", 1, 7, engines=2),
    "engine-8": _engines("transformers", 1, 8, engines=2),
    "engine-9": _engines("vllm", 0, 9),
    "engine-10": _engines("vllm", 1, 10),
    "rewards": lambda f, b: workers.kill_rewards(f, b, kills=5, steps=10, seed=11),
    "learner": lambda f, b: workers.kill_learner(f, b, kills=3, steps=8, seed=12),
    "driver-1": _driver("inline", 13, kills=6),
    "driver-2": _driver("inline", 14, kills=6),
    "driver-3": _driver("inline", 15, kills=5),
    "driver-4": _driver("ray", 16, kills=3),
    "stopped-1": lambda f, b: workers.stop_engine(f, b, seconds=60, timeout=120, steps=6),
    "stopped-2": lambda f, b: workers.stop_engine(f, b, seconds=60, timeout=10, steps=6),
    "full-disk": lambda f, b: machine.full_disk(f, b, steps=12),
    "read-only": machine.read_only,
    "truncated": lambda f, b: machine.truncated_checkpoint(f, b, steps=5),
    "clock": lambda f, b: machine.jumping_clock(f, b, steps=20),
}
SMALL: Mapping[str, Experiment] = {
    "engine": lambda f, b: workers.kill_engines(
        f, b, engine="transformers", staleness=1, kills=2, steps=8, seed=1, goal=None
    ),
    "driver": lambda f, b: kill_driver(f, b, runtime="inline", kills=2, steps=5, seed=2),
}
"""About a minute in all."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=description)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--small", action="store_true", help="a few kills, about a minute")
    parser.add_argument("--keep", type=Path, help="file with what was done before")
    parser.add_argument("--seconds", type=float, help="for the kills of one experiment, at most")
    parser.add_argument("--page", type=Path, help="write the table between the marks of this page")
    parser.add_argument("--folder", type=Path, help="for the runs, which stay there")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs are ended too
    experiments = SMALL if arguments.small else EXPERIMENTS
    if unknown := set(arguments.only or ()) - experiments.keys():
        parser.error(f"no experiment {', '.join(sorted(unknown))}; there are {list(experiments)}")
    results = _kept(arguments.keep)
    root = arguments.folder or Path(tempfile.mkdtemp(prefix="rlx-chaos-"))
    for name, experiment in experiments.items():
        if name in results or (arguments.only and name not in arguments.only):
            continue
        folder = root / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        results[name] = experiment(folder, Budget(arguments.seconds))
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
        if arguments.keep:
            _keep(arguments.keep, results)
    shown = [results[name] for name in experiments if name in results]
    print(table(shown))
    if arguments.page:
        _write_page(arguments.page, table(shown))
    sys.exit(any(one.good < one.injected for one in shown))


def table(outcomes: list[Outcome]) -> str:
    """Markdown, one row a fault, however many experiments did it."""
    rows: dict[str, Outcome] = {}
    for one in outcomes:
        rows[one.fault] = rows[one.fault] + one if one.fault in rows else one
    lines = ["| fault | done | as promised | what happened |", "|---|---|---|---|"]
    lines += [
        f"| {one.fault} | {one.injected} | {one.good} | {one.note.format(**one.numbers)} |"
        for one in rows.values()
    ]
    return "\n".join(lines)


def _write_page(page: Path, rows: str) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(_MARK)
    _, _, after = rest.partition(_MARK)
    page.write_text(f"{before}{_MARK}\n{rows}\n{_MARK}{after}", encoding="utf-8")


def _kept(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.is_file():
        return {}
    return {name: Outcome(**fields) for name, fields in json.loads(path.read_text()).items()}


def _keep(path: Path, results: Mapping[str, Outcome]) -> None:
    text = {name: dataclasses.asdict(one) for name, one in results.items()}
    path.write_text(json.dumps(text, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
