"""`python -m benchmarks.chaos`: every experiment, and a table of what they came to."""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.chaos import __doc__ as description
from benchmarks.chaos import machine, workers
from benchmarks.chaos.driver import kill_driver
from benchmarks.chaos.runs import Outcome

Experiment = Callable[[Path], Outcome]


def _engines(engine: str, staleness: int, seed: int, *, engines: int = 1) -> Experiment:
    return lambda folder: workers.kill_engines(
        folder,
        engine=engine,
        staleness=staleness,
        engines=engines,
        kills=5,
        steps=20,
        seed=seed,
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
    "rewards": lambda f: workers.kill_rewards(f, kills=5, steps=10, seed=6),
    "learner": lambda f: workers.kill_learner(f, kills=3, steps=8, seed=7),
    "driver-inline-1": lambda f: kill_driver(f, runtime="inline", kills=9, steps=8, seed=8),
    "driver-inline-2": lambda f: kill_driver(f, runtime="inline", kills=8, steps=8, seed=9),
    "driver-ray": lambda f: kill_driver(f, runtime="ray", kills=3, steps=8, seed=10),
    "stopped-waited": lambda f: workers.stop_engine(f, seconds=60, timeout=120, steps=6),
    "stopped-replaced": lambda f: workers.stop_engine(f, seconds=60, timeout=10, steps=6),
    "full-disk": lambda f: machine.full_disk(f, steps=12),
    "read-only": machine.read_only,
    "truncated": lambda f: machine.truncated_checkpoint(f, steps=5),
    "clock": lambda f: machine.jumping_clock(f, steps=20),
}
SMALL: Mapping[str, Experiment] = {
    "engine-transformers-ahead": lambda f: workers.kill_engines(
        f, engine="transformers", staleness=1, kills=2, steps=8, seed=1, goal=None
    ),
    "driver-inline": lambda f: kill_driver(f, runtime="inline", kills=2, steps=5, seed=2),
}
"""Under a minute in all."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=description)
    parser.add_argument("--only", nargs="+", metavar="NAME", help=", ".join(EXPERIMENTS))
    parser.add_argument("--small", action="store_true", help="a few kills, under a minute")
    parser.add_argument("--keep", type=Path, help="file with what was done before")
    parser.add_argument("--folder", type=Path, help="for the runs, which stay there")
    arguments = parser.parse_args()
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
        results[name] = experiment(folder)
        print(f"{name}: {results[name]}", file=sys.stderr, flush=True)
        if arguments.keep:
            _keep(arguments.keep, results)
    shown = [results[name] for name in experiments if name in results]
    print(table(shown))
    sys.exit(any(one.good < one.injected for one in shown))


def table(outcomes: list[Outcome]) -> str:
    lines = ["| fault | done | as promised | what happened |", "|---|---|---|---|"]
    lines += [f"| {one.fault} | {one.injected} | {one.good} | {one.note} |" for one in outcomes]
    return "\n".join(lines)


def _kept(path: Path | None) -> dict[str, Outcome]:
    if path is None or not path.is_file():
        return {}
    return {name: Outcome(**fields) for name, fields in json.loads(path.read_text()).items()}


def _keep(path: Path, results: Mapping[str, Outcome]) -> None:
    text = {name: dataclasses.asdict(one) for name, one in results.items()}
    path.write_text(json.dumps(text, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
