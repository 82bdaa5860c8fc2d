"""TRL in an environment of its own, with the very torch and transformers that rlx runs on.

Only TRL itself is installed there; a `.pth` file adds the packages of rlx's environment behind it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

REQUIREMENTS = Path(__file__).with_name("trl-requirements.txt")
FOLDER = Path(".venv-trl")


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trl-python",
        metavar="PATH",
        default=os.environ.get("TRL_PYTHON"),
        help="Python of an environment that has TRL (or TRL_PYTHON); without, "
        f"{FOLDER} is made with "
        f"{REQUIREMENTS.name} and the packages of this environment",
    )


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
