"""Python sessions in the sandbox (`rlx/plugins/rewards/sandbox`), one process tree each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.plugins.rewards import sandbox
from rlx.plugins.rewards.sandbox import Limits, drops_user, readable

_HERE = Path(sandbox.__file__).parent
_SESSION = f"import sys; sys.path.insert(0, {str(_HERE)!r}); import session; session.main()"
_STARTUP = 30.0
"""Seconds for a session to begin; a busy machine is slow."""
_END = 2.0
"""Seconds that the supervisor has to end what the session started."""
_LONGEST = 1 << 24
"""Bytes of a reply. The program writes what it likes; an honest one cuts its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What a piece of code came to."""

    text: str
    """What it printed, the value of its last expression, or the end of a traceback."""
    failed: bool
    ended: bool = False
    """The session is over, and with it all that was defined."""


class PythonSession:
    """A Python process that keeps what is defined from one piece of code to the next.

    Args:
        limits: of the whole session; `timeout` is for each piece of code.
        pieces: most pieces of code, which bounds the session's CPU time.
        output: characters of what one piece may show.
        site_packages: installed packages can be imported.
    """

    def __init__(
        self, *, limits: Limits, pieces: int, output: int, site_packages: bool = False
    ) -> None:
        self._limits = limits
        self._pieces = pieces
        self._output = output
        self._site_packages = site_packages
        self._process: asyncio.subprocess.Process | None = None
        self._folder: str | None = None
        self.isolated = True
        """The program has no network."""
        self.confined = True
        """It can't read or write the user's files."""

    async def run(self, code: str) -> Output:
        """Run a piece of code, in a new process where there is none (any more).

        Raises RuntimeError when the sandbox itself fails.
        """
        if self._process is None:
            await self._start()
        assert self._process is not None
        try:
            async with asyncio.timeout(self._limits.timeout):
                await self._write({"code": code})
                reply = await self._read()
            return Output(text=str(reply["text"]), failed=bool(reply["failed"]))
        except TimeoutError:
            why = f"it took longer than {self._limits.timeout:g} s"
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            why = await self._breach() or "its process ended"
        await self.close()
        return Output(text=f"[stopped: {why}; names are gone]", failed=True, ended=True)

    async def close(self) -> None:
        """End the session with all its processes, and remove its folder."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            process._transport.close()  # type: ignore[attr-defined]
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
            self._folder = None

    async def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="rlx-repl-")
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", "-c", _SESSION),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            start_new_session=True,
            limit=_LONGEST,
        )
        try:
            async with asyncio.timeout(_STARTUP):
                await self._write(await asyncio.to_thread(self._request, self._folder))
                facts = await self._read()
        except (TimeoutError, EOFError, OSError, ValueError) as error:
            said = await self._breach()
            await self.close()
            raise RuntimeError(f"the sandbox failed to start: {said or error!r}") from error
        except BaseException:
            await self.close()
            raise
        self.isolated, self.confined = bool(facts["isolated"]), bool(facts["confined"])

    def _request(self, folder: str) -> dict[str, Any]:
        limits = self._limits
        return {
            "folder": folder,
            "drop_user": drops_user(),
            "flags": ["-I"] if self._site_packages else ["-I", "-S"],
            "readable": readable(site_packages=self._site_packages),
            "runner": (_HERE / "repl.py").read_text(),
            "output": self._output,
            "timeout": limits.timeout * self._pieces,
            "memory_mib": limits.memory_mib,
            "file_mib": limits.file_mib,
            "processes": limits.processes,
        }

    async def _write(self, message: dict[str, Any]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise EOFError
        return dict(json.loads(line))

    async def _breach(self) -> str:
        """What the watcher said before it ended the program; empty when nothing."""
        assert self._process is not None
        assert self._process.stderr is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2):
                return (await self._process.stderr.read(2000)).decode(errors="replace").strip()
        return ""
