"""Installed distributions without pip: a dist-info folder and modules on a folder of `sys.path`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "unit"), str(TESTS / "integration")]

Install = Callable[..., Path]


def write_distribution(
    folder: Path,
    name: str,
    entry_points: Mapping[str, Mapping[str, str]],
    modules: Mapping[str, str] | None = None,
    *,
    version: str = "0.3",
) -> Path:
    """Lay down what pip would: metadata and modules. Returns the folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    header = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n\nA long description.\n"
    (info / "METADATA").write_text(header)
    groups = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in entry_points.items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
    for file, source in (modules or {}).items():
        (folder / file).write_text(source)
    return folder


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install distributions into a folder on `sys.path`; modules are forgotten afterwards."""
    site, work = tmp_path / "site", tmp_path / "work"
    site.mkdir()
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.delenv("RLX_PLUGINS", raising=False)
    monkeypatch.delenv("RLX_STRICT_PLUGINS", raising=False)
    path = list(sys.path)
    sys.path.insert(0, str(site))
    before = set(sys.modules)

    def make(name: str, entry_points, modules=None, *, version: str = "0.3", folder=None) -> Path:
        return write_distribution(folder or site, name, entry_points, modules, version=version)

    yield make
    sys.path[:] = path
    for module in set(sys.modules) - before:
        file = getattr(sys.modules[module], "__file__", None)
        if file and Path(file).is_relative_to(tmp_path):
            del sys.modules[module]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from whole_runs import write_workspace

    return write_workspace(tmp_path_factory.mktemp("workspace"))


@pytest.fixture
def workspace(template: Path, tmp_path: Path) -> Path:
    """A fresh working directory with `tiny/`, `data.jsonl` and `mypkg.py`."""
    folder = tmp_path / "workspace"
    shutil.copytree(template, folder)
    return folder
