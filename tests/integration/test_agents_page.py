"""docs/agents.md: its files and commands run as they stand, for a step or two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.engine]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE, re.DOTALL))
SNIPPETS = re.findall(r"```python\n(from rlx\.testing.*?)```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SMALL = {
    "RLX_STEPS": "2",
    "RLX_ROLLOUT__GROUPS": "4",
    "RLX_ROLLOUT__GROUP_SIZE": "4",
    "RLX_ROLLOUT__ENGINE": "transformers",
    "RLX_RUNTIME__KIND": "inline",
    "RLX_CHECKPOINT__EXPORT": "false",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    rlx = tmp_path / "bin" / "rlx"
    rlx.parent.mkdir()
    rlx.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m rlx "$@"\n')
    rlx.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("script", COMMANDS)
def test_commands_run(folder: Path, script: str) -> None:
    """About 10 s for each training run."""
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=folder,
        env={**os.environ, **SMALL, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_run(folder: Path, snippet: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    exec(snippet, {"__name__": "example"})


def test_every_example_was_found() -> None:
    assert set(FILES) >= {"hints.py", "reviewed.py", "shop.py"}
    assert len(COMMANDS) >= 6
    assert len(SNIPPETS) == 1
