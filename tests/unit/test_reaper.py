"""What a killed driver leaves behind is ended, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from rlx.core.engine import reaper

DRIVER = '''
import subprocess, sys, time
from rlx.core.engine.reaper import start_reaper

SLEEP = "import time; time.sleep(60)"
START = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {SLEEP!r}], stdout=subprocess.DEVNULL).pid)
"""
start_reaper()
child = subprocess.Popen([sys.executable, "-c", SLEEP])
orphan = subprocess.run([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True).stdout
print(child.pid, orphan, flush=True)
time.sleep(60)
'''


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_killed_driver_leaves_neither_child_nor_orphan(bystander: subprocess.Popen[bytes]):
    """Both are younger than the reaper's last look; the orphan's parent has ended, as that of
    Ray's workers does when it dies with the driver."""
    driver = subprocess.Popen([sys.executable, "-c", DRIVER], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    left = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(left) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _, alive = psutil.wait_procs(left, timeout=20)
    assert not alive
    assert bystander.poll() is None


def test_descendants_are_remembered_when_a_dying_driver_has_none_any_more(
    bystander: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
):
    looks = iter([[psutil.Process(bystander.pid)], []])
    ends = iter([False, False, True])
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: next(looks))
    monkeypatch.setattr(reaper, "_end_of_input", lambda timeout: next(ends))
    monkeypatch.setattr(reaper, "_PATIENCE", 0.1)
    monkeypatch.setattr(reaper, "_marked", lambda mark: [])
    reaper.watch(os.getppid(), "none")
    assert not psutil.pid_exists(bystander.pid)


def test_mark_ends_with_the_reaper():
    process = reaper.start_reaper()
    assert os.environ[reaper.MARK]
    reaper.stop_reaper(process)
    assert reaper.MARK not in os.environ
    assert process.poll() == -signal.SIGKILL
