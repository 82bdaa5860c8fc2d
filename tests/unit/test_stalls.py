"""Components whose calls never return in the driver: named, ended, or else the process is."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlx.core import calls, overdue, stalls
from rlx.core.calls import Call, OverdueError
from rlx.core.hooks import Hooks
from rlx.core.stalls import AgentBlockedError, Watched, begin, driven


class Run:
    """Notes what it is told; `cut` gives the call an end, as the end of the process would."""

    where = "step 3, advantage"
    next_step = "and so on"

    def __init__(self, *, timeout: float = 60.0, ends: bool = True) -> None:
        self.timeout = timeout
        self.ends = ends
        self.told: list[str] = []
        self.cuts: list[str] = []
        self.stacks = 0

    def tell(self, text: str) -> None:
        self.told.append(text)

    def write_stacks(self, loop: asyncio.AbstractEventLoop) -> str:
        self.stacks += 1
        return "; stacks are here"

    def cut(self, why: str) -> None:
        self.cuts.append(why)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "_INTERVAL", 0.05)
    monkeypatch.setattr(stalls, "_WARN_AFTER", 0.3)
    monkeypatch.setattr(overdue, "_EVERY", 0.1)
    monkeypatch.setattr(overdue, "_GRACE", 0.4)


def sleeps() -> None:
    time.sleep(60)


def spins() -> None:
    while True:
        pass


def watched(run: Run, work: Callable[[], Any]) -> None:
    """Run `work` on a loop that is watched, in this thread."""

    async def main() -> None:
        with driven(run):
            await asyncio.sleep(0.1)
            work()

    if threading.current_thread() is threading.main_thread():
        with calls.interruptible():
            asyncio.run(main())
    else:
        asyncio.run(main())


def never(function: Callable[[], None], **more: Any) -> None:
    with Call("estimator 'never'", **more):
        function()


@pytest.mark.parametrize("function", [sleeps, spins])
def test_call_that_never_returns_is_ended_after_stacks_are_written(function: Callable[[], None]):
    run = Run(timeout=0.5)
    with pytest.raises(OverdueError) as caught:
        watched(run, lambda: never(function))
    said = str(caught.value)
    assert said.startswith("step 3, advantage: estimator 'never' has not returned for 0.5 s")
    assert f"it is at test_stalls.py:{function.__code__.co_firstlineno + 1}" in said
    assert said.endswith("; stacks are here; and so on")
    assert (run.stacks, run.cuts) == (1, [])
    assert run.told[0].startswith("step 3, advantage: estimator 'never' has not returned for 0 s")
    assert f"in {function.__name__}" in run.told[0]


def test_call_that_goes_on_in_spite_of_exceptions_ends_the_process():
    run = Run(timeout=0.5)

    def stubborn() -> None:
        while not run.cuts:
            with suppress(BaseException):
                time.sleep(0.05)

    watched(run, lambda: never(stubborn))
    assert "no exception has ended it within 0 s, so the process ends; stacks" in run.cuts[0]


def test_what_an_ended_call_raises_instead_is_its_own_affair():
    def renames() -> None:
        try:
            time.sleep(60)
        except BaseException as error:
            raise ValueError("mine") from error

    with pytest.raises(OverdueError):
        watched(Run(timeout=0.3), lambda: never(renames))


def test_inline_run_is_told_and_goes_on():
    run = Run(timeout=0.4, ends=False)
    watched(run, lambda: never(lambda: time.sleep(1.0)))
    assert [("ended after" in text) for text in run.told] == [False, False]
    assert run.told[1].endswith("; stacks are here. Inline, nothing ends it but Ctrl-C")


def test_many_calls_that_return_are_not_one_that_does_not():
    run = Run(timeout=0.4)

    def work() -> None:
        for _ in range(12):
            never(lambda: time.sleep(0.1))

    watched(run, work)
    assert (run.told, run.cuts, run.stacks) == ([], [], 0)


def test_what_is_neither_component_nor_agent_is_only_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stalls, "_WARN_OF_OURS", 0.3)
    run = Run(timeout=0.6)
    watched(run, lambda: time.sleep(1.2))
    assert len(run.told) == 2
    assert "the driver has not got on for 0 s:\n" in run.told[0]
    assert run.told[1].endswith("has not got on for 1 s; stacks are here")


def test_time_in_a_debugger_does_not_count():
    prompt: dict[str, Any] = {"time": time, "__name__": "pdb"}
    exec("def interaction():\n    time.sleep(1.0)", prompt)
    run = Run(timeout=0.3)
    watched(run, lambda: never(prompt["interaction"]))
    assert (run.told, run.stacks) == ([], 0)


def test_agent_that_sleeps_in_the_main_thread_is_ended_at_its_time_out():
    async def agent() -> None:
        begin()
        time.sleep(60)

    async def main() -> None:
        job = asyncio.ensure_future(agent())
        with Watched(job, name="probe", task="one", timeout=0.4):
            await job

    started = time.monotonic()
    with calls.interruptible(), pytest.raises(AgentBlockedError):
        asyncio.run(main())
    assert time.monotonic() - started < 10


def test_observer_is_switched_off(caplog: pytest.LogCaptureFixture):
    import rlx

    seen = []

    class Plugin:
        @rlx.hookimpl
        def rlx_on_step_end(self, run: Any, step: int, metrics: Any) -> None:
            seen.append(step)
            time.sleep(60)

    hooks = Hooks()
    hooks.register(Plugin(), "slow")

    def work() -> None:
        for step in (1, 2):
            hooks.notify("rlx_on_step_end", run=SimpleNamespace(), step=step, metrics={})

    watched(Run(timeout=0.3), work)
    assert seen == [1]
    assert "hook rlx_on_step_end of plugin slow has not returned for 0.3 s" in caplog.text
    assert "it is switched off for the rest of the run" in caplog.text


def test_loop_of_another_thread_is_watched_too():
    run = Run(timeout=0.3)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            watched(run, lambda: never(spins))
        except OverdueError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)
    assert len(raised) == 1


def test_place_is_in_the_components_own_file(tmp_path: Path):
    source = "def own(function):\n    return function()\n"
    space: dict[str, Any] = {}
    exec(compile(source, str(tmp_path / "mine.py"), "exec"), space)
    found: list[str] = []

    def deeper() -> None:
        call = calls.under_way(threading.get_ident())
        assert call is not None
        found.append(calls.place(call, threading.get_ident()))

    def caller() -> None:
        with Call("hook"):
            space["own"](deeper)

    caller()
    assert found == ["mine.py:2 in own"]
