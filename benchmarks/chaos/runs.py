"""Runs of `rlx train` in processes of their own, and what is done to them."""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import rlx

MACHINE = ("time", "throughput/", "publish/", "memory/", "engine/")
"""Metrics that measure the machine and not the run."""
FAULTS = ("faults/", "reward/workers_replaced")
"""Metrics that count what is done to a run."""
COMMON = (
    "--set eval.sources=[] --set eval.every=0 --set logging.rollouts=complete "
    "--set logging.rollouts_max_mib=1000 --set runtime.cpus=1 --group-size 8 --max-new-tokens 10"
).split()


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an experiment came to."""

    fault: str
    injected: int
    """How often it was done."""
    good: int
    """How often the run ended, went on or could be resumed as promised."""
    note: str
    """What happened; `{name}` stands for a number."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Sums over experiments, where several did the same; of `most_…`, the largest."""

    def __add__(self, other: Outcome) -> Outcome:
        """Both, as one row of the table."""
        return Outcome(
            fault=self.fault,
            injected=self.injected + other.injected,
            good=self.good + other.good,
            note=self.note,
            numbers={
                name: max(value, other.numbers[name])
                if name.startswith("most_")
                else value + other.numbers[name]
                for name, value in self.numbers.items()
            },
        )


class Budget:
    """Time in which faults are injected; what was begun is then brought to its end.

    Args:
        seconds: None: as long as it takes.
    """

    def __init__(self, seconds: float | None) -> None:
        self._until = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> bool:
        return self._until is None or time.monotonic() < self._until


class LiveRun:
    """A run in a process of its own.

    Args:
        folder: of the run.
        words: of `rlx train`, without `--output`.
        prefix: Python code that the driver executes first.
        log: file for what it prints; unset: beside the folder.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str],
        *,
        resume: bool = False,
        prefix: str = "",
        log: Path | None = None,
    ) -> None:
        self.folder = folder
        self.log = log or folder.with_suffix(".log")
        self.started = time.monotonic()
        self.seconds = 0.0
        """From its start to its end, where `wait` saw that."""
        code = f"{prefix}\nfrom rlx.cli.main import main\nmain()"
        command = [sys.executable, "-c", code] if prefix else [sys.executable, "-m", "rlx"]
        more = ["--resume"] if resume else []
        with self.log.open("a") as output:
            self.process = subprocess.Popen(
                [*command, "train", *COMMON, *words, *more, "--output", str(folder)],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        atexit.register(self.process.kill)  # its own watcher ends its workers then

    def wait(self, timeout: float = 900.0) -> int:
        """Wait for its end; returns the exit code."""
        try:
            code = self.process.wait(timeout)
            self.seconds = time.monotonic() - self.started
            return code
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"it did not end:\n{self.tail()}") from None

    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, characters: int = 3000) -> str:
        return self.log.read_text(errors="replace")[-characters:]

    def wait_for_step(self, step: int, timeout: float = 600.0) -> bool:
        """Wait until a step is written; false when the run has ended before."""
        deadline = time.monotonic() + timeout
        while last_step(self.folder) < step:
            if not self.alive():
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"step {step} does not come:\n{self.tail()}")
            time.sleep(0.05)
        return True

    def worker(self, name: str, timeout: float = 300.0) -> psutil.Process | None:
        """The process that writes the worker's log; None when the run has ended."""
        log = str(self.folder / "logs" / f"{name}.log")
        deadline = time.monotonic() + timeout
        while self.alive() and time.monotonic() < deadline:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                if _output_of(process.pid) == log:
                    return process
            time.sleep(0.1)
        return None

    def kill_worker(self, name: str) -> bool:
        process = self.worker(name)
        if process is None:
            return False
        process.kill()
        return True

    def kill(self) -> None:
        """kill -9 of the driver, and wait until nothing of it is left."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        _, left = psutil.wait_procs(children, timeout=20)
        if left:
            raise RuntimeError(f"processes outlive their driver: {left}")


def finished(folder: Path, words: Sequence[str], **more: Any) -> LiveRun:
    """A run that is left alone."""
    run = LiveRun(folder, words, **more)
    code = run.wait()
    if code:
        raise RuntimeError(f"exit code {code}:\n{run.tail()}")
    return run


def left_alone(folder: Path, words: Sequence[str]) -> Path:
    """The folder of the same run without any fault, made where it isn't there yet.

    Inline, because that starts sooner: the runtime makes no difference to what is computed.

    Args:
        folder: of the experiment; the run lies beside it, for other experiments with the same
            source of rlx, of which every rounding may be another tomorrow.
    """
    digest = hashlib.blake2b(" ".join(words).encode(), digest_size=6)
    for path in sorted(Path(rlx.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    target = folder.parent / f"left-alone-{digest.hexdigest()}"
    if not (target / "finished.json").is_file():
        shutil.rmtree(target, ignore_errors=True)
        finished(target, [*words, "--runtime", "inline"])
    return target


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The steps' metrics without those that measure the machine or count the faults."""
    return [
        {key: value for key, value in record.items() if not key.startswith((*MACHINE, *FAULTS))}
        for record in _records(folder)
    ]


def mended(folder: Path, kind: str) -> int:
    """Lines of `faults.jsonl` about a kind of fault, those after the last step included."""
    path = folder / "faults.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return sum(json.loads(line)["fault"] == kind for line in lines)


def step_seconds(folder: Path) -> list[float]:
    """How long each step took, its checkpoint included."""
    return [float(record["time/step"]) for record in _records(folder)]


def last_step(folder: Path) -> int:
    records = _records(folder)
    return int(records[-1]["step"]) if records else 0


def same_result(folder: Path, other: Path) -> bool:
    """Whether two runs have the same metrics and the same final weights, bit by bit."""
    return metrics(folder) == metrics(other) and weights(folder) == weights(other)


def weights(folder: Path) -> bytes:
    return (folder / "export" / "model.safetensors").read_bytes()


def rollout_places(folder: Path) -> list[tuple[int, int]]:
    """(group, index) of every rollout that was trained on."""
    return [
        (record["group"], record["index"])
        for path in sorted((folder / "rollouts").glob("step-*.jsonl"))
        for record in map(json.loads, path.read_text().splitlines())
    ]


def _records(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _output_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/fd/1").readlink())
    except OSError:
        return ""
