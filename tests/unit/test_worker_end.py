"""How a worker's process ends: by Ray, which prints nothing then, and past Ray where it must."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from rlx.core.config import RuntimeConfig
from rlx.core.engine import ray_worker
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.ray_worker import RayProcess
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.engine.stacks import own_location

Start = Callable[[float], "subprocess.Popen[bytes]"]


@pytest.fixture
def sleeping() -> Iterator[Start]:
    """Starts processes that end by themselves after some seconds."""
    started: list[subprocess.Popen[bytes]] = []

    def start(seconds: float) -> subprocess.Popen[bytes]:
        code = f"import time; print(flush=True); time.sleep({seconds})"
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Exit code and seconds until it is known to have gone."""
    location = own_location()

    async def locate() -> object:
        return SimpleNamespace(here=True, host=location.host, pid=process.pid)

    async def wait() -> float:
        actor = SimpleNamespace(location=SimpleNamespace(remote=locate))
        worker = RayProcess(actor, watch=None)  # type: ignore[arg-type]
        await worker.locate()
        started = time.monotonic()
        await worker.gone()
        return time.monotonic() - started

    seconds = asyncio.run(wait())
    return process.wait(1), seconds


def test_process_that_ray_ends_is_not_killed_besides(sleeping: Start):
    code, _ = ended(sleeping(0.2))
    assert code == 0


def test_stopped_process_is_killed_at_once(sleeping: Start):
    process = sleeping(60)
    process.send_signal(signal.SIGSTOP)
    while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    code, seconds = ended(process)
    assert (code, seconds < 1) == (-signal.SIGKILL, True)


def test_process_that_ray_does_not_end_is_killed(sleeping: Start, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ray_worker, "_RAYS", 0.2)
    code, seconds = ended(sleeping(60))
    assert code == -signal.SIGKILL
    assert seconds >= 0.2


class Idle:
    def rest(self) -> None:
        """Does nothing."""


@pytest.mark.engine
def test_ray_says_nothing_about_workers_that_rlx_ends(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    """It is as for crashes: several lines a worker, yellow, on the terminal of a run that is well.
    A kill that overtakes Ray's own made them, for a third of the workers."""
    runtime = RayRuntime(RuntimeConfig(), logs=tmp_path, workers=4)
    env = {"PYTHONPATH": str(Path(__file__).parent)}
    target = "test_worker_end:Idle"

    async def start_and_end() -> None:
        specs = [WorkerSpec(name=f"idle-{n}", target=target, env=env) for n in range(4)]
        workers = await asyncio.gather(*map(runtime.start, specs))
        await asyncio.gather(*(worker.call("rest") for worker in workers))
        await runtime.end_all()
        await asyncio.sleep(1.0)  # Ray tells it a moment later
        await runtime.close()

    runtime.connect()
    asyncio.run(start_and_end())
    printed = "".join(capfd.readouterr())
    assert "died" not in printed
