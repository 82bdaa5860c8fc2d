r"""math-verify in child processes, so that no answer can stop the run.

`9^{9^{9}}` keeps sympy busy inside one C call: the thread can't be interrupted, and it holds the
interpreter lock, so that not even a time-out in another thread would fire. (math-verify's own
time-outs are signals, which only work in the main thread.) A child gives itself an alarm clock
whose signal ends it, whatever it is doing.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Final

UNDECIDED: Final = "undecided"
_LONGEST = 1000
"""Characters of an answer that are worth a parser; longer ones are not answers."""
_STARTUP = 120.0
"""Seconds for a child to import sympy on a busy machine."""
_MEMORY = 4 << 30
"""Bytes of address space of a child."""


class LabelError(ValueError):
    """A label that math-verify can't compare with."""


def equal(label: str, answer: str) -> bool:
    """Whether math-verify holds the two for equal, in this process and without a time-out.

    Raises `LabelError` when it finds nothing in the label to compare with.
    """
    from math_verify import verify

    expected = _parse(label)
    if not expected:
        raise LabelError(f"math-verify finds no number or expression in the label {label!r}")
    found = _parse(answer)
    return bool(found) and bool(verify(expected, found, timeout_seconds=None))


class Checker:
    """`equal` in at most `processes` children, started when they are first needed.

    Thread-safe. The children end with this process, however it ends: their standard input closes.
    """

    def __init__(self, processes: int = 2) -> None:
        self._slots = threading.BoundedSemaphore(processes)
        self._idle: list[_Child] = []
        self._pid = os.getpid()

    def equal(self, label: str, answer: str, timeout: float) -> bool | str:
        """Return the verdict, or `UNDECIDED` after `timeout` seconds or when sympy failed.

        Raises `LabelError` for a label that can't be compared with, `RuntimeError` when no child
        can start.
        """
        if len(answer) > _LONGEST:
            return False
        with self._slots:
            child = self._take()
            reply = child.ask({"label": label, "answer": answer, "timeout": timeout})
            if reply is None:  # its alarm clock rang
                child.close()
                return UNDECIDED
            self._idle.append(child)
        if "label" in reply:
            raise LabelError(reply["label"])
        return UNDECIDED if "failed" in reply else bool(reply["equal"])

    def close(self) -> None:
        """End the children that are idle."""
        while self._idle:
            self._idle.pop().close()

    def _take(self) -> _Child:
        if self._pid != os.getpid():  # after a fork: the children are the parent's
            self._idle, self._pid = [], os.getpid()
        while self._idle:
            child = self._idle.pop()
            if child.process.poll() is None:
                return child
            child.close()
        return _Child()


class _Child:
    """A process that answers one JSON line with one JSON line."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            start_new_session=True,  # Ctrl-C is the parent's to handle
        )
        if self._read() is None:
            self.close()
            raise RuntimeError(
                f"the process that runs math-verify did not start (exit code "
                f"{self.process.returncode}); what it printed is above"
            )

    def ask(self, request: dict[str, object]) -> dict[str, str] | None:
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except OSError:
            return None
        return self._read()

    def _read(self) -> dict[str, str] | None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return dict(json.loads(line)) if line.endswith("\n") else None

    def close(self) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        self.process.kill()
        self.process.wait()


def serve() -> None:
    """Answer comparisons until standard input closes (the body of a child)."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the default action ends the process
    signal.setitimer(signal.ITIMER_REAL, _STARTUP)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable()  # math-verify logs every answer that it can't parse
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries that print don't break the protocol
    import math_verify  # noqa: F401 - its seconds of import are not the first answer's

    signal.setitimer(signal.ITIMER_REAL, 0)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["timeout"])
        reply = _reply(request["label"], request["answer"])
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(reply), file=replies, flush=True)


def _reply(label: str, answer: str) -> dict[str, object]:
    try:
        return {"equal": equal(label, answer)}
    except LabelError as error:
        return {"label": str(error)}
    except Exception as error:  # sympy raises whatever it likes on what a policy writes
        return {"failed": repr(error)}


@lru_cache(maxsize=256)  # all rollouts of a group compare with the same label
def _parse(text: str) -> list[object]:
    from math_verify import parse

    return list(parse(f"\\boxed{{{text}}}", parsing_timeout=None))


checker = Checker()
atexit.register(checker.close)
