"""A process that forks one child per request, so that each check gets a fresh process quickly.

It imports torch and the input types once, and no component; nothing of the driver reaches it but
the pickled request. It ends when the driver closes its standard input.
"""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from pathlib import Path
from typing import IO, Any

_LENGTH = struct.Struct("!Q")
SECONDS = 120
"""Longest that a child may take."""

_process: subprocess.Popen[bytes] | None = None


def call_in_fresh_process(message: bytes) -> Any:
    """Return `call(reference.resolve(), argument)` for a pickled (reference, call, argument).

    Raises `RuntimeError` with the child's traceback.
    """
    process = _running()
    assert process.stdin is not None
    assert process.stdout is not None
    _write(process.stdin, message)
    reply = _read(process.stdout)
    if reply is None:
        raise RuntimeError("the process that runs checks died")
    ok, value = pickle.loads(reply)
    if not ok:
        raise RuntimeError(value)
    return value


def _running() -> subprocess.Popen[bytes]:
    global _process
    if _process is None or _process.poll() is not None:
        import rlx

        root = str(Path(rlx.__file__).resolve().parent.parent)
        _process = subprocess.Popen(
            [sys.executable, "-m", "rlx.testing.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"},
        )
        atexit.register(_stop, _process)
    return _process


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None and not process.stdin.closed:
        process.stdin.close()
    try:
        process.wait(timeout=10)
    except subprocess.TimeoutExpired:
        process.kill()
    if process.stdout is not None:
        process.stdout.close()


def _serve(requests: IO[bytes], replies: IO[bytes]) -> None:
    import torch

    import rlx.core.inputs  # noqa: F401 - what every child needs

    torch.set_num_threads(1)
    while (message := _read(requests)) is not None:
        inlet, outlet = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(inlet)
            signal.alarm(SECONDS)
            with os.fdopen(outlet, "wb") as pipe:
                pipe.write(_answer(message))
            os._exit(0)
        os.close(outlet)
        with os.fdopen(inlet, "rb") as pipe:
            reply = pipe.read()
        os.waitpid(child, 0)
        _write(replies, reply or pickle.dumps((False, "the process died or took too long")))


def _answer(message: bytes) -> bytes:
    try:
        ref, call, argument = pickle.loads(message)
        return pickle.dumps((True, call(ref.resolve(), argument)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))


def _write(stream: IO[bytes], message: bytes) -> None:
    stream.write(_LENGTH.pack(len(message)) + message)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    head = stream.read(_LENGTH.size)
    return stream.read(_LENGTH.unpack(head)[0]) if len(head) == _LENGTH.size else None


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what plugins print must not get between the replies
    _serve(sys.stdin.buffer, replies)
