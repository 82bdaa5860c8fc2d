"""`rlx serve-reward` as a process of its own, on loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass
class RewardServer:
    process: subprocess.Popen[str]
    url: str
    log: Path

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """As when its machine goes away."""
        self.process.kill()
        self.process.wait(10)

    def end(self) -> int:
        """SIGTERM; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(30)


@contextmanager
def reward_server(
    folder: Path, *words: str, port: int = 0, env: dict[str, str] | None = None
) -> Iterator[RewardServer]:
    """`rlx serve-reward WORDS` in `folder`, from when it listens until the block ends."""
    log = folder / f"server-{time.monotonic_ns()}.txt"
    command = [sys.executable, "-m", "rlx", "serve-reward", *words, "--port", str(port)]
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(env or {})},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
    try:
        yield RewardServer(process, _wait_for_url(process, log), log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)


def _wait_for_url(process: subprocess.Popen[str], log: Path) -> str:
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        found = re.search(r" on (http://\S+)/score", log.read_text())
        if found:
            return found.group(1)
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(log.read_text())
