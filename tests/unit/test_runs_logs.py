"""`rlx runs logs`: one place to look, in the order of time."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rlx.cli.main import app
from rlx.cli.runs_logs import new_lines
from rlx.core.config import RunConfig
from rlx.core.engine.logs import DriverLog
from rlx.core.run import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = tmp_path / "runs" / "mine"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "logs" / "driver.log").write_text(
        "2026-03-01T10:00:00.000 INFO rlx.driver: starting\n"
        "2026-03-01T10:00:02.000 ERROR rlx.driver: the run ended with an error\n"
        "Traceback (most recent call last):\n"
    )
    (run / "logs" / "learner-0.log").write_bytes(
        b"2026-03-01T10:00:01.000 WARNING py.warnings: odd \xff byte\n"
    )
    return run


def logs(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["runs", "logs", str(folder), *words])
    return result.exit_code, result.output + str(result.exception or "")


def test_lines_of_all_workers_come_in_the_order_of_time(folder: Path):
    code, text = logs(folder)
    assert code == 0
    assert text.splitlines() == [
        "driver    | 2026-03-01T10:00:00.000 INFO rlx.driver: starting",
        "learner-0 | 2026-03-01T10:00:01.000 WARNING py.warnings: odd \ufffd byte",
        "driver    | 2026-03-01T10:00:02.000 ERROR rlx.driver: the run ended with an error",
        "driver    | Traceback (most recent call last):",
    ]
    assert logs(folder, "-n", "1")[1].startswith("driver | Traceback")


def test_one_worker_can_be_chosen_and_a_wrong_name_is_told(folder: Path):
    assert logs(folder, "--worker", "learner-0")[1].count("\n") == 1
    code, text = logs(folder, "-w", "lerner-0")
    assert code != 0
    assert "learner-0" in text


def test_new_lines_are_followed_when_they_are_whole(folder: Path):
    lines = new_lines(folder, [])
    with (folder / "logs" / "learner-0.log").open("a") as file:
        file.write("first\nsecond, not who")
        file.flush()
        assert next(lines) == ("", "learner-0", "first")
        file.write("le\n")
    assert next(lines).text == "second, not whole"


def test_the_driver_notes_steps_and_its_end(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    log = DriverLog()
    log.start(Run(name="mine", folder=tmp_path, config=RunConfig()))
    log.status("training")
    log.log(1, {"reward/mean": 0.25, "time/step": 1.5})
    log.close(ValueError("that was it"))
    text = (tmp_path / "logs" / "driver.log").read_text()
    assert "INFO rlx.driver: training\n" in text
    assert "step 1: reward/mean 0.25, time/step 1.5\n" in text
    assert "ERROR rlx.driver: the run ended with an error\n" in text
    assert "ValueError: that was it" in text
    assert not logging.getLogger("rlx.driver").handlers
