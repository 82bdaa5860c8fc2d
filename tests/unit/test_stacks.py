"""Stacks of processes that hang, running or stopped, here or on another node, in files."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from rlx.core.engine import stacks
from rlx.core.engine.stacks import Elsewhere, Location, Suspect, dump_stacks, own_location

HANGS = """
import time
from rlx.core.engine.process_stacks import write_stacks_on_signal

def waits_for_ever():
    print("ready", flush=True)
    time.sleep(60)

write_stacks_on_signal()
waits_for_ever()
"""


def here(pid: int) -> Location:
    return dataclasses.replace(own_location(), pid=pid)


def there(node: str, pid: int) -> Location:
    return Location(node=node, host="host", pid=pid)


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", HANGS], stdout=output, stderr=subprocess.STDOUT
        )
    while "ready" not in log.read_text():
        assert process.poll() is None, log.read_text()
        time.sleep(0.02)
    yield process
    process.kill()
    process.wait()


async def nowhere(node: str, pids: Sequence[int]) -> list[str]:
    raise AssertionError("all processes are here")


def dumped(folder: Path, location: Location, elsewhere: Elsewhere = nowhere) -> str:
    suspect = Suspect(name="learner-0", location=location, doing=["update"])
    written = asyncio.run(dump_stacks(folder / "stacks", "learner-0", [suspect], elsewhere))
    assert written.parent == folder / "stacks"
    assert "test_stacks.py" in (written / "driver.txt").read_text()
    return (written / "learner-0.txt").read_text()


def test_stacks_of_a_hanging_process_name_the_function(
    tmp_path: Path, hanging: subprocess.Popen[bytes]
):
    process = hanging
    text = dumped(tmp_path, here(process.pid))
    assert "in waits_for_ever" in text
    assert "the driver waits for: update" in text
    assert process.poll() is None, "asking for the stacks does not end it"


def test_stopped_process_writes_its_stacks_stays_stopped_and_py_spy_is_asked(
    tmp_path: Path,
    hanging: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
):
    process = hanging
    spy = tmp_path / "py-spy"
    spy.write_text('#!/bin/sh\necho "native stack of $3"\n')
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.02)
    text = dumped(tmp_path, here(process.pid))
    assert "state of the process: stopped" in text
    assert "in waits_for_ever" in text
    assert psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
    assert f"native stack of {process.pid}" in text


def test_process_that_is_gone_is_said_to_be(tmp_path: Path):
    gone = subprocess.Popen(["true"])
    gone.wait()
    assert "The process is gone." in dumped(tmp_path, here(gone.pid))


def test_other_nodes_are_asked_each_once_and_at_the_same_time(tmp_path: Path):
    asked: dict[str, list[int]] = {}

    async def all_asked(node: str, pids: Sequence[int]) -> list[str]:
        asked[node] = list(pids)
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        return [f"stack of {pid} on {node}\n" for pid in pids]

    suspects = [
        Suspect(name=f"w-{pid}", location=there(node, pid), doing=[])
        for node, pid in (("a", 1), ("b", 2), ("a", 3))
    ]
    written = asyncio.run(dump_stacks(tmp_path, "w-1", suspects, all_asked))
    assert asked == {"a": [1, 3], "b": [2]}
    assert "process 3 on host (node a)" in (written / "w-3.txt").read_text()
    assert "stack of 3 on a" in (written / "w-3.txt").read_text()


def test_node_that_is_gone_or_does_not_answer_leaves_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(stacks, "ELSEWHERE_PATIENCE", 0.2)

    async def refused(node: str, pids: Sequence[int]) -> list[str]:
        raise RuntimeError("the node is dead")

    async def silent(node: str, pids: Sequence[int]) -> list[str]:
        await asyncio.sleep(60)
        return []

    for elsewhere, why in ((refused, "the node is dead"), (silent, "not answer within 0.2 s")):
        text = dumped(tmp_path, there("a", 7), elsewhere)
        assert why in text
        assert "On host: py-spy dump --pid 7" in text
