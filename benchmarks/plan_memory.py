"""What `rlx plan` says of memory against what the processes of a real run took.

python -m benchmarks.plan_memory                              # the embedded model
python -m benchmarks.plan_memory --model models/smollm2-135m-instruct --data DATA

Peak resident memory (VmHWM) of each worker, which a hook of the run writes down twice a second.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

HOOK = """
import pathlib
import re
import threading
import time

import rlx


@rlx.hookimpl
def rlx_on_worker_start(ctx):
    file = pathlib.Path(ctx.run_folder) / f"peak-{ctx.role}-{ctx.rank}"

    def watch():
        while True:
            status = pathlib.Path("/proc/self/status").read_text()
            file.write_text(re.search(r"VmHWM:\\s+(\\d+)", status)[1])
            time.sleep(0.5)

    threading.Thread(target=watch, daemon=True).start()
"""
NAMES = {"rollout": "engine", "reward": "rewards", "scorer": "reference"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("more", nargs="*", help="options of `rlx train`, after --")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(Path(folder), options.more)


def compare(folder: Path, more: list[str]) -> None:
    (folder / "rlxfile.py").write_text(HOOK)
    words = ["--steps", "3", "--kl-coef", "0.01", "--output", "out", *more]
    command = [sys.executable, "-m", "rlx", "train", *words, "--set", "checkpoint.export=false"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
    print("| role | planned | measured | planned ÷ measured |\n|---|---|---|---|")
    for name, (planned, peak) in sorted(sides(folder / "out").items()):
        print(
            f"| {name} | {planned / 2**20:,.0f} MiB | {peak / 2**20:,.0f} MiB "
            f"| {planned / peak:.2f} |"
        )


def sides(run: Path) -> dict[str, tuple[int, int]]:
    """Bytes that were planned and that were taken, by role."""
    from rlx.core.machine import this_machine
    from rlx.core.models import model_info
    from rlx.core.placement import roles
    from rlx.core.plugins import PluginSystem
    from rlx.core.selection import select
    from rlx.core.settings import load_settings

    config = load_settings(files=[run / "config.yaml"], env={}).config
    selection = select(config, PluginSystem.load())
    placed = roles(config, selection, model_info(config.model), this_machine())
    planned = {role.name: role.memory for role in placed}
    found = {}
    for file in run.glob("peak-*"):
        role, rank = file.name.removeprefix("peak-").rsplit("-", 1)
        name = NAMES.get(role, role)
        name = name if name in planned else f"{name}-{rank}"
        if (estimate := planned.get(name)) is not None:
            found[name] = (estimate, int(file.read_text()) * 1024)
    return found


if __name__ == "__main__":
    main()
