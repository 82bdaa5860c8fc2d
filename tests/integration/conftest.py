"""Fixtures for whole runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "unit"))


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
