"""Ctrl-C and SIGTERM: in order, then at once, and also while the event loop is blocked."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest

from rlx.core.calls import Call, CallEnded
from rlx.core.engine import signals as module
from rlx.core.engine.signals import Signals
from rlx.core.errors import RunInterrupted
from rlx.core.stalls import Watched, begin


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes of the ends of the process that there would have been."""
    found: list[int] = []
    monkeypatch.setattr(module, "end_now", found.append)
    monkeypatch.setattr(module, "_STOP_SECONDS", 0.6)
    monkeypatch.setattr(module, "_BLOCKED_SECONDS", 0.2)
    return found


def during(work: Callable[[Signals, list[int]], Any], **settings: Any) -> list[int]:
    """Run `work` on a loop with signals; returns what the loop was told."""
    told: list[int] = []

    async def run() -> None:
        signals = Signals(
            told.append, where=lambda: "step 3, advantage", saved=lambda: "nothing", **settings
        )
        with signals:
            answer = work(signals, told)
            if answer is not None:
                await answer

    asyncio.run(run())
    return told


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


def send(number: int, *, after: float = 0.0) -> None:
    threading.Timer(after, os.kill, (os.getpid(), number)).start()


def test_first_signal_is_told_to_the_loop_and_the_handlers_are_put_back(cuts: list[int]):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    async def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGTERM)
        while not told:
            await asyncio.sleep(0.01)
        assert signals.number == signal.SIGTERM

    assert during(work) == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert signal.set_wakeup_fd(-1) == -1
    assert cuts == []
    assert not [one for one in threading.enumerate() if one.name == "rlx-signals"]


def test_second_signal_ends_at_once_while_the_loop_is_blocked(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(module, "_STOP_SECONDS", 60.0)
    monkeypatch.setattr(module, "_BLOCKED_SECONDS", 60.0)

    def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGINT, after=0.1)
        send(signal.SIGINT, after=0.3)
        with Call("estimator 'never'"):
            sleeps(0.8)
        assert not told, "the loop has not run"

    during(work)
    assert cuts == [130]
    said = capfd.readouterr().err
    assert "the run is cut in step 3, advantage: estimator 'never' has not returned" in said
    assert "in sleeps" in said


def test_component_that_blocks_the_loop_is_ended_by_the_first_signal(
    cuts: list[int], capfd: pytest.CaptureFixture[str]
):
    def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGINT, after=0.1)
        refused = pytest.raises(RunInterrupted, match="Ctrl-C while estimator 'never' has not")
        with refused, Call("estimator 'never'"):
            time.sleep(60)

    started = time.monotonic()
    during(work)
    assert time.monotonic() - started < 5
    assert cuts == []
    assert "step 3, advantage: estimator 'never' has not returned" in capfd.readouterr().err


def test_signal_ends_a_component_while_nobody_reads_standard_error(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "_TELLING", 0.1)
    full, standard_error = os.pipe(), os.dup(2)
    os.set_blocking(full[1], False)
    with suppress(BlockingIOError):
        while True:
            os.write(full[1], b"x" * 4096)
    os.set_blocking(full[1], True)

    def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGTERM, after=0.1)
        os.dup2(full[1], 2)
        try:
            with pytest.raises(RunInterrupted), Call("tracker 'console' in log()", observer=True):
                os.write(2, b"step 7\n")
        finally:
            os.dup2(standard_error, 2)

    during(work)
    for end in (*full, standard_error):
        os.close(end)
    assert cuts == []


def test_agents_that_block_one_after_the_other_are_all_ended(cuts: list[int]):
    ended: list[int] = []

    async def agent(number: int) -> None:
        begin()
        try:
            time.sleep(60)
        except BaseException:
            ended.append(number)
            raise

    async def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGINT, after=0.1)
        with ExitStack() as watched:
            jobs = [asyncio.ensure_future(agent(number)) for number in range(5)]
            for number, job in enumerate(jobs):
                one = Watched(job, name="probe", task=str(number), timeout=60.0)
                watched.enter_context(one)
            await asyncio.wait(jobs)
        assert [type(job.exception()) for job in jobs] == [CallEnded] * 5

    assert during(work) == [signal.SIGINT]
    assert (ended, cuts) == ([0, 1, 2, 3, 4], [])


def test_agents_go_on_while_something_is_saved(cuts: list[int]):
    """An update that is waited for: groups that run beside it are a part of what is saved."""

    async def agent() -> None:
        begin()
        for _ in range(5):
            await asyncio.sleep(0.01)
            time.sleep(0.1)

    async def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGINT)
        job = asyncio.ensure_future(agent())
        with Watched(job, name="probe", task="1", timeout=60.0):
            await job

    assert during(work, saving=lambda: True) == [signal.SIGINT]
    assert cuts == []


def test_what_can_not_be_ended_is_cut_at_the_deadline(cuts: list[int]):
    def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGTERM)
        until = time.monotonic() + 1.5
        with Call("estimator 'stubborn'"):
            while time.monotonic() < until:
                with suppress(BaseException):
                    time.sleep(0.1)

    during(work)
    assert cuts == [143]


@pytest.mark.parametrize(
    ("saving", "stop_timeout", "seconds", "cut"),
    [(False, 60.0, 1.2, [143]), (True, 60.0, 1.2, []), (True, 0.5, 1.2, [143])],
    ids=["hangs", "saves", "saves-too-long"],
)
def test_only_saving_is_waited_for_and_not_for_ever(
    cuts: list[int], saving: bool, stop_timeout: float, seconds: float, cut: list[int]
):
    async def work(signals: Signals, told: list[int]) -> None:
        send(signal.SIGTERM)
        await asyncio.sleep(seconds)

    during(work, saving=lambda: saving, stop_timeout=stop_timeout)
    assert cuts == cut


def test_a_loop_that_takes_the_descriptor_gets_its_signals_and_ours_still_come(cuts: list[int]):
    others: list[int] = []

    async def work(signals: Signals, told: list[int]) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, others.append, 1)
        send(signal.SIGTERM, after=0.1)
        while not told:
            await asyncio.sleep(0.01)
        send(signal.SIGUSR1)
        while not others:
            await asyncio.sleep(0.01)
        asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)

    assert during(work) == [signal.SIGTERM]
    assert signal.set_wakeup_fd(-1) == -1, "the descriptor of a loop that is closed"


def test_a_descriptor_that_was_closed_meanwhile_is_not_put_back(cuts: list[int]):
    mine, end = socket.socketpair()
    mine.setblocking(False)
    signal.set_wakeup_fd(mine.fileno())

    def work(signals: Signals, told: list[int]) -> None:
        mine.close()

    during(work)
    end.close()
    assert signal.set_wakeup_fd(-1) == -1


def test_outside_of_the_main_thread_nothing_is_installed():
    before = signal.getsignal(signal.SIGINT)
    seen: list[Any] = []

    def work(signals: Signals, told: list[int]) -> None:
        seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=during, args=(work,))
    thread.start()
    thread.join()
    assert seen == [before]


def test_forked_child_dies_of_sigterm_and_its_parent_is_not_told(cuts: list[int]):
    def work(signals: Signals, told: list[int]) -> None:
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
            os._exit(7)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM
        time.sleep(0.2)
        assert signals.number is None

    during(work)
