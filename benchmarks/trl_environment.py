"""TRL in an environment of its own, with the very torch and transformers that rlx runs on.

Only TRL itself is installed there; a `.pth` file adds the packages of rlx's environment behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol, TypeVar

REQUIREMENTS = Path(__file__).with_name("trl-requirements.txt")
FOLDER = Path(".venv-trl")


class Timed(Protocol):
    @property
    def seconds(self) -> float: ...


S = TypeVar("S", bound=Timed)


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trl-python",
        metavar="PATH",
        default=os.environ.get("TRL_PYTHON"),
        help="Python of an environment that has TRL (or TRL_PYTHON); without, "
        f"{FOLDER} is made with "
        f"{REQUIREMENTS.name} and the packages of this environment",
    )


def add_side_options(parser: argparse.ArgumentParser) -> None:
    """Which sides run, how often; `--trl-python` beside them."""
    parser.add_argument("--rounds", type=int, default=1, help="times that each side runs")
    parser.add_argument("--settings", nargs="+", help="of TRL; else those that were its fastest")
    parser.add_argument("--only", choices=("rlx", "trl"), help="one side alone")
    add_option(parser)


def in_turns(sides: Mapping[str, Callable[[], S]], rounds: int) -> dict[str, list[S]]:
    """Run the sides in turns, `rounds` times, and say how long each took; outcomes by side."""
    found: dict[str, list[S]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            found[side].append(run())
            print(f"{side}: {found[side][-1].seconds:.2f} s", file=sys.stderr, flush=True)
    return found


def trl_python(given: str | None) -> str:
    """The Python that runs TRL; makes its environment where it is missing."""
    if given:
        return given
    python = FOLDER / "bin" / "python"
    if not python.exists():
        print(f"making {FOLDER} with TRL …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        install = [str(python), "-m", "pip", "install", "-qq", "--no-deps", "-r", str(REQUIREMENTS)]
        subprocess.run(install, check=True)
        _share_packages(python)
    return str(python)


def _share_packages(python: Path) -> None:
    """Let the environment see the packages of the one that runs this."""
    question = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    answer = subprocess.run([python, "-c", question], check=True, capture_output=True, text=True)
    ours = sysconfig.get_paths()["purelib"]
    Path(answer.stdout.strip(), "shared.pth").write_text(f"{ours}\n")
