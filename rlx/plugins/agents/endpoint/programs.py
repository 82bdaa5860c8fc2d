"""The program that acts as the agent: a Python function, or a command that is run."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import math
import os
import shlex
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rlx.core.episode import Episode
from rlx.core.errors import ComponentError, UsageError, did_you_mean
from rlx.core.importing import import_target
from rlx.core.rewards import excerpt
from rlx.core.stalls import AgentBlockedError, Watched, begin
from rlx.core.threads import DaemonThreads

_BEAT = 0.1
_SILENT = 1.0
"""Seconds without a sign of life after which the loop counts as blocked."""


class _OtherLoop:
    """An event loop in a daemon thread for the programs of all episodes.

    One that blocks it is ended like an agent that blocks the episodes' loop (`stalls`), and the
    time that the others waited for it is not theirs. A call that blocks in C can't be ended: the
    loop is given up with the programs in it, and a new one serves those that follow.

    The thread
      consumes:      programs
      waits for:     its event loop
      unblocked by:  nothing; it ends with the process
      produces:      results in the loop that asked, and a beat
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._beaten = time.monotonic()
        self.given_up = False
        threading.Thread(target=self._work, name="rlx-programs", daemon=True).start()

    async def run(self, make: Callable[[], Awaitable[Any]], episode: Episode) -> Any:
        """Await `make()` in the other loop; cancelled here, it is cancelled there."""
        limit = episode.limits.step_timeout or math.inf
        work = asyncio.run_coroutine_threadsafe(_guarded(make, episode, limit), self._loop)
        done = asyncio.wrap_future(work)
        try:
            while not done.done():
                await asyncio.wait({done}, timeout=min(_SILENT, limit / 4))
                self._look(episode, limit)
        finally:
            done.cancel()
        return done.result()

    def _look(self, episode: Episode, limit: float) -> None:
        silent = time.monotonic() - self._beaten
        if silent < min(_SILENT, limit / 4):
            return
        if episode.agent_since is not None:
            episode.agent_since = time.monotonic()
        if self.given_up or silent > limit + 2 * _GRACE:
            self.given_up = True
            raise ComponentError(
                "a program blocked the event loop that all `async` programs share for longer than "
                "episode.step_timeout: await what takes time, or write it without `async`"
            )

    def _work(self) -> None:
        self._loop.call_soon(self._beat)
        while True:  # what was raised to end a program may come when it has just ended
            with contextlib.suppress(AgentBlockedError):
                self._loop.run_forever()

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._loop.call_later(_BEAT, self._beat)


def _shared_loop() -> _OtherLoop:
    """The loop of the programs; a new one where the last was given up."""
    global _loop
    if _loop is None or _loop.given_up:
        _loop = _OtherLoop()
    return _loop


async def _guarded(make: Callable[[], Awaitable[Any]], episode: Episode, limit: float) -> Any:
    job = asyncio.current_task()
    assert job is not None
    begin()
    with Watched(job, name="openai", task=episode.task.id, timeout=limit):
        return await _without_exit(make)


async def _without_exit(make: Callable[[], Awaitable[Any]]) -> Any:
    """SystemExit in a task would end the event loop."""
    try:
        return await make()
    except SystemExit as error:
        raise ComponentError(f"its program called sys.exit({error.code!r})") from error


_threads = DaemonThreads("rlx-program")
_loop: _OtherLoop | None = None
_GRACE = 2.0
"""Seconds that a command has to end after SIGTERM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What a program is given for one episode. A function takes those that it names."""

    task: Mapping[str, Any]
    """The task's columns, with `id`, `prompt` (text, or chat messages) and `label`."""
    base_url: str
    """Of the OpenAI API, `http://127.0.0.1:PORT/v1`."""
    api_key: str
    """Good for this episode only."""
    model: str
    seed: int
    """Of the episode, for programs that draw random numbers."""


_GIVEN = tuple(field for field in Call.__dataclass_fields__)


class Program(Protocol):
    """Solves one task through the endpoint; returns what it has to say of the outcome."""

    async def __call__(self, call: Call, episode: Episode) -> Any: ...


class FunctionProgram:
    """`solve(task, base_url, api_key)`, or any of the fields of `Call`; sync or async.

    Coroutines share an event loop in a thread beside that of the episodes, so that one that blocks
    doesn't hold up the endpoint; any other function runs in a thread of its own.
    """

    def __init__(self, reference: str) -> None:
        label = f"the agent's program {reference!r}"
        if ":" not in reference:
            raise UsageError(
                f"{label} is no reference", where="agent.program", fix="file.py:function"
            )
        self._function: Callable[..., Any] = import_target(
            reference, label=label, where="agent.program"
        )
        if not callable(self._function):
            raise UsageError(f"{label} is no function", where="agent.program")
        self._names = _named(self._function, label)

    async def __call__(self, call: Call, episode: Episode) -> Any:
        given = {name: getattr(call, name) for name in self._names}
        if inspect.iscoroutinefunction(self._function):
            return await _shared_loop().run(lambda: self._function(**given), episode)
        return await _threads.run(lambda: self._function(**given), timeout=math.inf)


class CommandProgram:
    """A command, run once for each episode, that finds the endpoint in its environment.

    `OPENAI_BASE_URL`, `OPENAI_API_KEY`, `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY` are what the
    clients of both look for; the task comes as JSON on the standard input (`Call`'s other fields
    in `RLX_MODEL` and `RLX_SEED`). The last line of its output, if it is JSON, is the result.
    """

    def __init__(self, command: str) -> None:
        try:
            self._words = shlex.split(command)
        except ValueError as error:
            raise UsageError(f"{command!r}: {error}", where="agent.command") from None
        if not self._words:
            raise UsageError("the command is empty", where="agent.command")

    async def __call__(self, call: Call, episode: Episode) -> Any:
        process = await asyncio.create_subprocess_exec(
            *self._words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, **_environment(call)},
            start_new_session=True,
        )
        task = json.dumps(dict(call.task), default=str).encode()
        try:
            output, errors = await process.communicate(task)
        finally:
            await _end(process)
        if process.returncode:
            last = excerpt(errors.decode(errors="replace").strip()[-2000:], 500)
            raise ComponentError(
                f"{shlex.join(self._words)} ended with exit code {process.returncode}: {last}"
            )
        return _result(output.decode(errors="replace"))


def _named(function: Callable[..., Any], label: str) -> Sequence[str]:
    """The fields of `Call` that a function takes."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return _GIVEN
    for parameter in parameters:
        known = parameter.name in _GIVEN and parameter.kind is not parameter.POSITIONAL_ONLY
        if not known and parameter.default is parameter.empty:
            hint = did_you_mean(parameter.name, _GIVEN) or f"it is given: {', '.join(_GIVEN)}"
            raise UsageError(
                f"{label} has the parameter {parameter.name!r}", where="agent.program", fix=hint
            )
    return [parameter.name for parameter in parameters if parameter.name in _GIVEN]


def _environment(call: Call) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": call.base_url,
        "OPENAI_API_KEY": call.api_key,
        "ANTHROPIC_BASE_URL": call.base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": call.api_key,
        "RLX_MODEL": call.model,
        "RLX_SEED": str(call.seed),
    }


async def _end(process: asyncio.subprocess.Process) -> None:
    """End the command and all that it started, whether it is done or was given up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(process.wait()), _GRACE)
            if number == signal.SIGTERM:
                continue
            return


def _result(output: str) -> Any:
    """The last line as JSON; None where it is none."""
    lines = output.strip().splitlines()
    if not lines:
        return None
    try:
        return json.loads(lines[-1])
    except ValueError:
        return None
