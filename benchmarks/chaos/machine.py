"""A full disk, a read-only one, a damaged checkpoint, a clock that jumps."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.chaos.runs import (
    Budget,
    LiveRun,
    Outcome,
    finished,
    last_step,
    left_alone,
    same_result,
)
from rlx.core.engine.checkpoints import checkpoints, damage, latest_checkpoint

WORDS = "--groups 4 --engine transformers --runtime inline --checkpoint-every 1"
JUMPING_CLOCK = """
import threading, time
real, offset = time.time, [0.0]
time.time = lambda: real() + offset[0]
for after, jump in ((6.0, 86_400.0), (8.0, -172_800.0), (10.0, 3600.0)):
    timer = threading.Timer(after, lambda jump=jump: offset.__setitem__(0, jump))
    timer.daemon = True
    timer.start()
"""


def words_for(steps: int, *more: str) -> list[str]:
    return [*WORDS.split(), "--steps", str(steps), *more]


def full_disk(folder: Path, _: Budget, *, steps: int) -> Outcome:
    """The run ends at the checkpoint that does not fit, and goes on where there is room."""
    plain = left_alone(folder, words_for(steps))
    size = (steps // 2) * _size(latest_checkpoint(plain / "checkpoints"))
    with _small_disk(folder / "disk", size) as disk:
        words = words_for(steps, "--set", "checkpoint.keep=100")
        log = folder / "disk.log"
        run = LiveRun(disk / "run", words, log=log)
        code = run.wait()
        reached = last_step(run.folder)
        said = "No space left on device" in run.tail()
        whole = latest_checkpoint(run.folder / "checkpoints")
        _remount(disk, f"size={10 * size}")
        finished(disk / "run", words, resume=True, log=log)
        same = same_result(run.folder, plain)
    good = code == 1 and said and whole is not None and same
    return Outcome(
        fault="full disk",
        injected=1,
        good=int(good),
        note=f"ends in step {reached + 1} of {steps} and says so; {whole and whole.name} is whole; "
        f"with room again `--resume` gives {'the same' if same else 'other'} weights",
    )


def read_only(folder: Path, _: Budget) -> Outcome:
    """Refused before anything starts; in mid-run it ends at the next checkpoint."""
    with _small_disk(folder / "refused", 1 << 20) as disk:
        _remount(disk, "ro")
        run = LiveRun(disk / "run", words_for(3), log=folder / "refused.log")
        refused = run.wait() == 2 and "is not a folder that can be written to" in run.tail()
    target = folder / "ended"
    with _small_disk(target / "checkpoints", 64 << 20) as disk:
        run = LiveRun(target, words_for(1000), log=folder / "ended.log")
        run.wait_for_step(2)
        _remount(disk, "ro")
        ended = run.wait() == 1 and "Read-only file system" in run.tail()
        whole = latest_checkpoint(disk) is not None
    return Outcome(
        fault="read-only run folder from the start, read-only checkpoints in mid-run",
        injected=2,
        good=int(refused) + int(ended and whole),
        note="refused before the start; in mid-run it ends at the next checkpoint and says so, the "
        "last one is whole",
    )


def truncated_checkpoint(folder: Path, _: Budget, *, steps: int) -> Outcome:
    """The newest checkpoint is cut short: the one before it is resumed from."""
    plain = left_alone(folder, words_for(steps))
    done = good = 0
    for name in ("state.pt", "model/model.safetensors", "files.json"):
        target = folder / f"cut-{done}"
        finished(target, words_for(steps - 2, "--set", "checkpoint.keep=3"))
        newest = max(checkpoints(target / "checkpoints"))
        path = newest / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        done += 1
        found = bool(damage(newest))
        finished(target, words_for(steps), resume=True)
        good += found and same_result(target, plain)
    return Outcome(
        fault="newest checkpoint truncated by hand",
        injected=done,
        good=good,
        note="passed over; the one before it is resumed from, to the same weights",
    )


def jumping_clock(folder: Path, _: Budget, *, steps: int) -> Outcome:
    """The wall clock jumps by days in both directions; nothing but time stamps may change."""
    plain = left_alone(folder, words_for(steps))
    run = finished(folder / "jumps", words_for(steps), prefix=JUMPING_CLOCK)
    same = same_result(run.folder, plain)
    return Outcome(
        fault="wall clock jumps by +1 day, −2 days, +1 hour",
        injected=3,
        good=3 * same,
        note="weights and metrics as with a steady clock, bit by bit",
    )


@contextmanager
def _small_disk(place: Path, size: int) -> Iterator[Path]:
    """A file system of its own in memory (needs root)."""
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "rlx", str(place)], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def _remount(place: Path, option: str) -> None:
    """Change a mount; as long as a file there is written, it is busy."""
    command = ["mount", "-o", f"remount,{option}", str(place)]
    deadline = time.monotonic() + 30
    while subprocess.run(command, stderr=subprocess.DEVNULL).returncode:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{place} can't be mounted again with {option}")
        time.sleep(0.05)


def _size(folder: Path | None) -> int:
    assert folder is not None
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
