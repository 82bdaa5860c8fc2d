"""Both runtimes host the same plain class; errors keep their type and name the worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from rlx.core.config import FaultsConfig, RuntimeConfig
from rlx.core.engine import ray_head
from rlx.core.engine.inline_runtime import InlineRuntime
from rlx.core.engine.ray_runtime import RayRuntime
from rlx.core.engine.ray_worker import RayWorker
from rlx.core.engine.runtime import Runtime, WorkerSpec
from rlx.core.errors import ComponentError, EngineError, UsageError, WorkerLostError


class Counter:
    """A worker with every kind of method."""

    def __init__(self, start: int) -> None:
        self.value = start
        self.aborted = False
        self.thread = threading.get_ident()

    def add(self, amount: int) -> int:
        assert threading.get_ident() == self.thread
        self.value += amount
        return self.value

    async def add_later(self, amount: int, *, delay: float = 0.0) -> int:
        await asyncio.sleep(delay)
        return self.value + amount

    async def count(self, until: int) -> AsyncIterator[int]:
        for number in range(until):
            yield number

    def wait_for_abort(self) -> bool:
        deadline = time.monotonic() + 20
        while not self.aborted and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def fail(self) -> None:
        raise UsageError("bad value", where="--x", fix="write y")

    def fail_otherwise(self) -> None:
        raise ComponentError("reward 'math' raised")

    def die(self) -> None:
        import os

        os._exit(3)


class Sleeper:
    """A worker whose import or constructor hangs."""

    def __init__(self) -> None:
        time.sleep(1000)


SPEC = WorkerSpec(
    name="counter",
    target="test_runtime:Counter",
    kwargs={"start": 5},
    env={"PYTHONPATH": str(Path(__file__).parent)},
)


def exercise(runtime: Runtime) -> dict[str, object]:
    async def use() -> dict[str, object]:
        worker = await runtime.start(SPEC)
        seen: dict[str, object] = {}
        try:
            seen["sync"] = await worker.call("add", 2)
            seen["async"] = await worker.call("add_later", 1, delay=0.01)
            seen["stream"] = [item async for item in worker.stream("count", 3)]
            waiting = asyncio.ensure_future(worker.call("wait_for_abort"))
            await asyncio.sleep(0.1)
            await worker.now("abort")
            seen["aborted"] = await waiting
            for method in ("fail", "fail_otherwise"):
                with pytest.raises((UsageError, ComponentError)) as caught:
                    await worker.call(method)
                seen[method] = caught.value
        finally:
            await runtime.close()
        return seen

    return asyncio.run(use())


def check(seen: dict[str, object]) -> None:
    assert seen["sync"] == 7
    assert seen["async"] == 8
    assert seen["stream"] == [0, 1, 2]
    assert seen["aborted"] is True
    error = seen["fail"]
    assert isinstance(error, UsageError)
    assert (error.what, error.where, error.fix) == ("bad value", "--x", "write y")
    assert isinstance(seen["fail_otherwise"], ComponentError)


def test_inline_runtime_runs_a_worker():
    check(exercise(InlineRuntime()))


@pytest.fixture
def ray_runtime(tmp_path: Path) -> Iterator[RayRuntime]:
    runtime = RayRuntime(RuntimeConfig(), logs=tmp_path, workers=1)
    runtime.connect()
    yield runtime
    asyncio.run(runtime.close())


@pytest.mark.engine
def test_ray_runtime_runs_a_worker(ray_runtime: RayRuntime):
    seen = exercise(ray_runtime)
    check(seen)
    assert "fail_otherwise" in str(getattr(seen["fail_otherwise"], "__notes__", ""))


@pytest.mark.engine
def test_dead_actor_is_named(ray_runtime: RayRuntime):
    async def kill() -> None:
        worker = await ray_runtime.start(SPEC)
        with pytest.raises(EngineError, match="'counter' died during 'die'"):
            await worker.call("die")

    asyncio.run(kill())


@pytest.mark.engine
def test_worker_that_hangs_while_it_is_made_is_given_up_with_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    async def located(self: RayRuntime, worker: RayWorker) -> None:
        await worker.located()
        self._faults = FaultsConfig(start_timeout=1.0)

    monkeypatch.setattr(RayRuntime, "_located", located)
    stacks = tmp_path / "stacks"
    runtime = RayRuntime(RuntimeConfig(), logs=tmp_path, workers=1, stacks=stacks)
    runtime.connect()

    async def hang() -> None:
        try:
            await runtime.start(dataclasses.replace(SPEC, target="test_runtime:Sleeper", kwargs={}))
        finally:
            await runtime.close()

    with pytest.raises(WorkerLostError, match=r"'counter' has not started within 1 s.*stacks"):
        asyncio.run(hang())
    text = next(stacks.glob("*/counter.txt")).read_text()
    assert "the driver waits for: start" in text
    assert "test_runtime.py" in text


def test_an_address_without_a_cluster_is_told_at_once():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # taken, and not listened on
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        runtime = RayRuntime(RuntimeConfig(ray_address=address), logs=None, workers=1)
        with pytest.raises(UsageError, match=f"no Ray cluster at {address}.*refused") as caught:
            runtime.connect()
    assert caught.value.where == "runtime.ray_address"


@pytest.mark.parametrize("address", ["127.0.0.1", "http://127.0.0.1:8265", "127.0.0.1:99999999"])
def test_what_is_no_address_of_a_cluster_is_the_users_mistake(address: str):
    runtime = RayRuntime(RuntimeConfig(ray_address=address), logs=None, workers=1)
    with pytest.raises(UsageError, match=f"no Ray cluster at {address}"):
        runtime.connect()


@pytest.mark.parametrize("backlog", ["silent", "full"])
def test_an_address_that_takes_connections_and_says_nothing_is_told_in_time(
    backlog: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(ray_head, "KNOCK", 0.5)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as server, contextlib.ExitStack() as waiting:
        server.bind(("127.0.0.1", 0))
        server.listen(0 if backlog == "full" else 8)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        for _ in range(4 if backlog == "full" else 0):
            client = waiting.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        monkeypatch.setenv("RAY_ADDRESS", address)
        runtime = RayRuntime(RuntimeConfig(), logs=None, workers=1)
        began = time.monotonic()
        with pytest.raises(UsageError, match=f"no Ray cluster at {address}.*(timed out|answered)"):
            runtime.connect()
    assert time.monotonic() - began < 5
