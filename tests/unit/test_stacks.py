"""Stacks of processes that hang, running or stopped, in files."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from rlx.core.engine.stacks import Location, Suspect, dump_stacks, own_location

HANGS = """
import time
from rlx.core.engine.stacks import write_stacks_on_signal

def waits_for_ever():
    print("ready", flush=True)
    time.sleep(60)

write_stacks_on_signal()
waits_for_ever()
"""


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGS], stdout=output, stderr=subprocess.STDOUT
        )
    while "ready" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    yield process, log
    process.kill()
    process.wait()


def dumped(folder: Path, location: Location, log: Path | None) -> str:
    suspect = Suspect(name="learner-0", location=location, doing=["update"], log=log)
    asyncio.run(dump_stacks(folder / "stacks", [suspect]))
    assert "test_stacks.py" in (folder / "stacks" / "driver.txt").read_text()
    return (folder / "stacks" / "learner-0.txt").read_text()


def test_stacks_of_a_hanging_process_name_the_function(
    tmp_path: Path, hanging: tuple[subprocess.Popen[bytes], Path]
):
    process, log = hanging
    text = dumped(tmp_path, Location(host=own_location().host, pid=process.pid), log)
    assert "in waits_for_ever" in text
    assert "the driver waits for: update" in text
    assert process.poll() is None, "asking for the stacks does not end it"


def test_stopped_process_is_said_to_be_stopped_and_py_spy_is_asked(
    tmp_path: Path,
    hanging: tuple[subprocess.Popen[bytes], Path],
    monkeypatch: pytest.MonkeyPatch,
):
    process, log = hanging
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "native stack of $3"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    text = dumped(tmp_path, Location(host=own_location().host, pid=process.pid), log)
    assert "state of the process: stopped" in text
    assert "It does not answer the signal" in text
    assert f"native stack of {process.pid}" in text


def test_process_that_is_gone_or_elsewhere_is_said_to_be(tmp_path: Path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    here = own_location().host
    assert "The process is gone." in dumped(tmp_path, Location(host=here, pid=gone.pid), None)
    assert "py-spy dump --pid 7" in dumped(tmp_path, Location(host="other", pid=7), None)
