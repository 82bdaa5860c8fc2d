"""`rlx runs verify`: damage of every kind is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from rlx.cli.runs import app
from rlx.core.engine.checkpoints import write_index


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "good"
    for step in (2, 4):
        checkpoint = folder / "checkpoints" / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "state.pt").write_bytes(b"state" * 100)
        write_index(checkpoint)
    (folder / "checkpoints" / "latest").symlink_to("step-000004")
    (folder / "rollouts").mkdir()
    (folder / "config.yaml").write_text("steps: 4\n")
    (folder / "manifest.json").write_text("{}")
    for name in ("metrics.jsonl", "rollouts/step-000001.jsonl"):
        (folder / name).write_text("".join(json.dumps({"step": i}) + "\n" for i in range(4)))
    return folder


def verify(folder: Path) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["verify", str(folder)], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_whole_run_is_whole(run: Path) -> None:
    code, text = verify(run)
    assert code == 0
    assert "damaged" not in text
    assert text.count("│ whole") == 6
    assert "next: rlx runs show" in text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("checkpoints/step-000004/state.pt", cut, "has 497 bytes instead of 500"),
        ("checkpoints/step-000004/state.pt", flip, "another checksum"),
        ("checkpoints/step-000004/state.pt", Path.unlink, "state.pt is missing"),
        ("checkpoints/step-000004/files.json", Path.unlink, "missing or unreadable"),
        ("metrics.jsonl", cut, "line 4"),
        ("rollouts/step-000001.jsonl", cut, "line 4"),
        ("manifest.json", Path.unlink, "unreadable"),
        ("metrics.jsonl", Path.unlink, "it is missing"),
    ],
)
def test_damage_is_named(run: Path, name: str, harm: Callable[[Path], None], said: str) -> None:
    harm(run / name)
    code, text = verify(run)
    assert code == 1
    assert text.count("damaged") == 1
    assert said in text
    newest = "step-000002" if "step-000004" in name else "step-000004"
    assert f"--resume goes on from checkpoints/{newest}" in text


@pytest.fixture
def finished(run: Path) -> Path:
    (run / "export").mkdir()
    save_file({"weight": np.zeros(1000, np.float32)}, run / "export" / "model.safetensors")
    (run / "finished.json").write_text('{"step": 3}')
    return run


def lose_a_line(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(True)[:-1]))


@pytest.mark.parametrize(
    ("name", "harm", "said"),
    [
        ("export/model.safetensors", cut, "model.safetensors: "),
        ("export/model.safetensors", lambda path: path.write_bytes(b""), "model.safetensors: "),
        ("export/model.safetensors", Path.unlink, "no weights"),
        ("metrics.jsonl", lose_a_line, "no line of step 3"),
    ],
)
def test_damage_of_a_finished_run_is_named(
    finished: Path, name: str, harm: Callable[[Path], None], said: str
) -> None:
    assert verify(finished)[0] == 0
    harm(finished / name)
    code, text = verify(finished)
    assert code == 1
    assert text.count("damaged") == 1
    assert said in text
