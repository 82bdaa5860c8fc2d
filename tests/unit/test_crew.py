"""The workers of a run: what is started anew in the place of one that is lost, and what no more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.core.config import RunConfig
from rlx.core.engine.crew import Crew
from rlx.core.engine.runtime import WorkerSpec
from rlx.core.errors import WorkerLostError
from rlx.core.plugins import PluginSystem

SPEC = WorkerSpec(name="engine-0", target="nowhere:Engine", role="rollout")
LOST = WorkerLostError("engine-0", "died during 'generate'")


class Runtime:
    """Notes what is started and ended."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.while_ending: Callable[[], Awaitable[None]] | None = None
        self.hangs = False

    async def seat(self, specs: list[WorkerSpec]) -> list[WorkerSpec]:
        return specs

    async def start(self, spec: WorkerSpec) -> Any:
        self.said.append(f"start {spec.name}")

        async def call(method: str) -> None:
            await asyncio.sleep(60 if self.hangs else 0)

        return SimpleNamespace(name=spec.name, call=call)

    async def write_stacks(self, about: str) -> str:
        return f"; the stacks of {about} are written"

    async def end(self, worker: Any) -> None:
        self.said.append(f"end {worker.name}")
        if self.while_ending is not None:
            await self.while_ending()

    async def end_all(self) -> None:
        self.said.append("end all")

    async def close(self) -> None:
        self.said.append("close")


@pytest.fixture
def runtime() -> Runtime:
    return Runtime()


@pytest.fixture
def crew(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Crew:
    async def opened(self: Crew, count: int) -> Runtime:
        return runtime

    monkeypatch.setattr(Crew, "_open_runtime", opened)
    selected: Any = SimpleNamespace(rewards=(), shipped_modules=list)
    return Crew(
        RunConfig.model_validate({"output": tmp_path, "faults": {"start_timeout": 0.2}}),
        selected,
        plugins=PluginSystem.load(),
        folder=tmp_path,
        status=lambda text: None,
    )


def test_lost_engine_is_ended_and_started_anew(crew: Crew, runtime: Runtime):
    async def lose() -> None:
        await crew.start([SPEC])
        renew = crew.engine_renewal()
        assert renew is not None
        assert (await renew(LOST)).name == "engine-0"

    asyncio.run(lose())
    assert runtime.said == ["start engine-0", "end engine-0", "start engine-0"]
    assert crew.faults.take_metrics() == {"faults/engine_restarts": 1.0}


@pytest.mark.parametrize("ended_by", ["end_all", "close"])
def test_engine_that_was_ended_is_not_started_anew(crew: Crew, runtime: Runtime, ended_by: str):
    """When generation runs ahead, requests run on it at the end, and tell of its death."""

    async def lose() -> None:
        await crew.start([SPEC])
        renew = crew.engine_renewal()
        assert renew is not None
        await getattr(crew, ended_by)()
        with pytest.raises(WorkerLostError, match="died during 'generate'"):
            await renew(LOST)

    asyncio.run(lose())
    assert runtime.said.count("start engine-0") == 1
    assert crew.faults.take_metrics() == {}, "and it is no fault"


def test_engine_that_dies_shortly_before_the_end_is_not_started_after_it(
    crew: Crew, runtime: Runtime
):
    async def lose() -> None:
        await crew.start([SPEC])
        runtime.while_ending = crew.end_all
        renew = crew.engine_renewal()
        assert renew is not None
        with pytest.raises(WorkerLostError):
            await renew(LOST)
        runtime.while_ending = None
        await crew.start([SPEC])
        again = crew.engine_renewal()
        assert again is not None
        await again(LOST)

    asyncio.run(lose())
    assert runtime.said == [
        *("start engine-0", "end engine-0", "end all"),
        *("start engine-0", "end engine-0", "start engine-0"),
    ]


def test_worker_that_does_not_load_in_time_is_lost_with_stacks(crew: Crew, runtime: Runtime):
    runtime.hangs = True
    what = "has not started within 0.2 s .*; the stacks of engine-0 are written"
    with pytest.raises(WorkerLostError, match=what) as caught:
        asyncio.run(crew.start([SPEC]))
    assert caught.value.hung
