"""A fresh virtual environment in which plugins are really installed, by pip.

It sees the packages of the environment that runs the tests, so nothing heavy is installed twice;
what is installed into it lies in a `site-packages` of its own. `rlx`, `pip` and `pytest` are on its
`PATH`, and a user's shell commands run in it as they are written.
"""

from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sysconfig
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENTS = ("rlx-reasoning-gym", "rlx-gymnasium", "rlx-verifiers")
"""Examples that need packages from the index (`requirements/environments.lock`)."""
_SHIM = '#!/bin/sh\nexec "{python}" -m {module} "$@"\n'


class Environment:
    """A virtual environment in a folder, made when this is constructed (well below a second)."""

    def __init__(self, folder: Path) -> None:
        venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
        self.bin = folder / "bin"
        self.python = self.bin / "python"
        self.site = Path(
            sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        )
        base = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (self.site / "base.pth").write_text(base)
        (self.site / "rlx_checkout.pth").write_text(f"{ROOT}\n")
        for name in ("rlx", "pip", "pytest"):
            shim = self.bin / name
            shim.write_text(_SHIM.format(python=self.python, module=name))
            shim.chmod(0o755)

    def install(self, *packages: Path | str, editable: bool = False) -> None:
        """`pip install` folders or wheels, without touching the network."""
        words = [word for package in packages for word in ([*(["-e"] * editable), str(package)])]
        self.run("pip", "install", "--quiet", "--no-deps", *words, timeout=300)

    def rlx(self, *arguments: str, cwd: Path, code: int = 0, **variables: str) -> str:
        """Run the command line and return what it printed, errors included."""
        return self.run("rlx", *arguments, cwd=cwd, code=code, **variables)

    def run(
        self,
        program: str,
        *arguments: str,
        cwd: Path | None = None,
        code: int | None = 0,
        timeout: float = 240,
        **variables: str,
    ) -> str:
        """Run a program of the environment, check its exit code, return its output."""
        done = subprocess.run(
            [str(self.bin / program), *arguments],
            cwd=cwd,
            env=self.variables(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert code is None or done.returncode == code, done.stdout[-6000:]
        return done.stdout

    def shell(self, script: str, *, cwd: Path, timeout: float = 280, **variables: str) -> str:
        """Run a user's commands as they stand; the first that fails ends them."""
        done = subprocess.run(
            ["sh", "-e", "-c", script],
            cwd=cwd,
            env=self.variables(**variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.returncode == 0, f"{script}\n{done.stdout[-6000:]}"
        return done.stdout

    def variables(self, **more: str) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "PYTEST", "RLX", "PIP"))
        }
        return kept | {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(self.bin.parent),
            "OMP_NUM_THREADS": "2",
            "COLUMNS": "200",
            "TERM": "dumb",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip's way to say: no isolation
            "PIP_NO_INDEX": "1",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            **more,
        }


def write_wheel(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "0.3",
) -> Path:
    """Write a wheel as a build backend would, only faster; returns its path.

    Args:
        entry_points: group → name → target.
        modules: file name → source.
    """
    escaped = name.replace("-", "_")
    info = f"{escaped}-{version}.dist-info"
    points = "\n".join(
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in entry_points.items()
    )
    files = dict(modules or {})
    files[f"{info}/METADATA"] = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = points
    record = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*record, f"{info}/RECORD,,"]) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{escaped}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


def train_arguments(output: str, *, steps: int = 2) -> Sequence[str]:
    """A small run of the tiny model in a workspace of `tests/integration/whole_runs.py`."""
    return (
        f"train --model tiny --data data.jsonl --runtime inline --engine transformers "
        f"--steps {steps} --groups 4 --group-size 4 --max-new-tokens 8 --lr 1e-3 --output {output}"
    ).split()
