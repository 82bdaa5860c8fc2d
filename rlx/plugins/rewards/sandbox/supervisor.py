"""The trusted side of the sandbox: isolates itself, starts the program, runs the tests on it.

Runs in an interpreter of its own (a request as JSON on standard input), so it imports the standard
library and its neighbours only. The program lives in another process that has no descriptor of the
verdict and can't trace this one. Tests run here and see only data that the program sent, so that
neither `os._exit(0)`, a replaced `assert` nor an object that equals everything passes one.
"""

import builtins
import contextlib
import ctypes
import io
import json
import os
import pickle
import resource
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn, TypeAlias

import landlock  # the neighbouring files: their folder is on this interpreter's path
import user
import watch
from start import bounds, spawn

Request: TypeAlias = dict[str, Any]
CLONE_NEWUSER, CLONE_NEWPID = 0x10000000, 0x20000000
CLONE_NEWNET, CLONE_NEWIPC = 0x40000000, 0x08000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE = 1, 4
MESSAGE = 64 << 20
"""Bytes of the largest message that the program may send."""
OUTPUT = 4 << 20
"""Bytes of standard output that are read from a program."""
JUDGE_MIB = 1024
"""Address space for the tests and for what the program sends them, at least."""
DATA = {
    "builtins": {"complex", "set", "frozenset", "bytearray", "range"},
    "collections": {"deque"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "datetime": {"datetime", "date", "time", "timedelta"},
}
"""Classes that data from the program may be made of."""
libc = ctypes.CDLL(None, use_errno=True)


class DiedError(Exception):
    """The program ended or broke the protocol."""


class UnsupportedError(Exception):
    """The test needs something that can't travel between two processes."""


class TimeUp(BaseException):
    """The program's seconds are over."""


class RaisedError(Exception):
    """The program raised an exception of its own."""


def main() -> None:
    request = json.load(sys.stdin)
    verdict = os.dup(1)
    os.set_inheritable(verdict, False)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    request["user"] = user.own_user()
    isolated, dropped = isolate(request)
    watch.adopt_orphans()
    judged, result_end = os.pipe()
    child = os.fork()  # the first child after `isolate` is process 1 of the new PID namespace:
    if not child:  # when it ends, the kernel ends whatever the program left running
        os.close(judged)
        os.close(verdict)
        judge_and_tell(request, result_end)
    os.close(result_end)
    breach = watch.watch(child, judged, request["folder"], bounds(request))
    if breach:
        result = {"passed": 0, "stopped": breach.limit, "detail": f"ended: {breach.detail}"}
    else:
        text = read_all(judged)
        # Nothing: killed by the program, where no namespace keeps it from that.
        result = json.loads(text or '{"passed": 0, "detail": "the program killed its supervisor"}')
    watch.end_descendants()
    confined = dropped or landlock.version() > 0
    told = {**result, "isolated": isolated, "confined": confined, "nonce": request["nonce"]}
    os.write(verdict, json.dumps(told).encode())
    os._exit(0)


def judge_and_tell(request: Request, result_end: int) -> NoReturn:
    """Run the tests and write what they said to a pipe."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # neither ptrace nor /proc/…/fd of this process
    watch.adopt_orphans()
    # What the program sends is unpacked here, and may be made to unpack to anything.
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (max(request["memory_mib"], JUDGE_MIB) << 20, hard))
    try:
        result = judge(request)
    except BaseException:
        result = {"crashed": traceback.format_exc()}
    os.write(result_end, json.dumps(result).encode())
    os._exit(0)


def read_all(fd: int) -> bytes:
    data = b""
    while piece := os.read(fd, 1 << 16):
        data += piece
    return data


def isolate(request: Request) -> tuple[bool, bool]:
    """Leave network, other processes and, when root, the user behind.

    Returns whether the namespaces and whether the other user were to be had.
    """
    flags = CLONE_NEWNET | CLONE_NEWPID | CLONE_NEWIPC
    root = os.geteuid() == 0
    done = root and libc.unshare(flags) == 0
    if dropped := root and bool(request["drop_user"]):
        user.drop(request["user"], request["folder"])
    return done or libc.unshare(flags | CLONE_NEWUSER) == 0, dropped


def judge(request: Request) -> dict[str, Any]:
    """Run all tests; `{"passed", "total", "detail"}`, `{"timed_out"}` or `{"unsupported": why}`."""

    def ring(*_: object) -> None:
        raise TimeUp

    signal.signal(signal.SIGALRM, ring)
    # Again and again: a test's bare `except:` catches it too.
    signal.setitimer(signal.ITIMER_REAL, request["timeout"], 0.2)
    try:
        return run_io(request) if request["kind"] == "io" else run_code(request)
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    except TimeUp:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        return {"timed_out": True}


def run_io(request: Request) -> dict[str, Any]:
    """Each test is an input and the output that a run of the program has to print for it."""
    passed, details = 0, []
    for test in request["tests"]:
        child = spawn(
            request,
            ["-c", request["program"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert child.stdin is not None
        assert child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(test["input"].encode())
            child.stdin.close()
        output = child.stdout.read(OUTPUT).decode(errors="replace")
        child.stdout.close()
        code = child.wait()
        good = code == 0 and lines(output) == lines(test["output"])
        passed += good
        if not good:
            details.append(f"{fate(code)}, printed {output[:200]!r}")
    return {"passed": passed, "total": len(request["tests"]), "detail": "; ".join(details[:3])}


def fate(code: int) -> str:
    """What an exit code of `subprocess` means."""
    if code >= 0:
        return f"with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def run_code(request: Request) -> dict[str, Any]:
    """Each test is Python code that calls the program's functions."""
    program = Program(request)
    total = len(request["tests"])
    try:
        names = program.ask("load", request["program"])[1]
    except Exception as error:
        return {"passed": 0, "total": total, "detail": describe(error)}
    scope: dict[str, Any] = {"__name__": "tests"}
    if request["prelude"]:  # helpers of the task itself, not the program's idea of them
        exec(compile(request["prelude"], "<prompt>", "exec"), scope)
    entry = request["entry_point"]
    for name in names:
        if name == entry or name not in scope:
            scope[name] = Remote(program, name)
    passed, details = 0, []
    for test in request["tests"]:
        try:
            exec(compile(test, "<test>", "exec"), scope)
            if request["check"]:
                scope["check"](scope[entry] if entry in names else Remote(program, entry))
            if program.dead:
                raise DiedError(program.epitaph(EOFError()))
            passed += 1
        except (UnsupportedError, TimeUp):
            raise
        except BaseException as error:  # a test may well end in sys.exit()
            details.append(describe(error, test))
    return {"passed": passed, "total": total, "detail": "; ".join(details[:3])}


def describe(error: BaseException, test: str = "") -> str:
    """The error, and the line of the test that it came from."""
    line, trace = 0, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "<test>":
            line = trace.tb_lineno
        trace = trace.tb_next
    place = f" in `{test.splitlines()[line - 1].strip()[:200]}`" if line else ""
    message = f": {str(error)[:300]}" if str(error) else ""
    return f"{type(error).__name__}{place}{message}"


def exception(name: str, message: str) -> Exception:
    """The program's exception: tests may expect a built-in one."""
    known = getattr(builtins, name, None)
    if isinstance(known, type) and issubclass(known, Exception):
        with contextlib.suppress(TypeError):  # UnicodeDecodeError wants five arguments
            return known(message)
    return RaisedError(f"{name}: {message}")


class Program:
    """The other process, by its two pipes."""

    def __init__(self, request: Request) -> None:
        their_end, self.sink = os.pipe()
        self.source, their_sink = os.pipe()
        self.process = spawn(
            request,
            ["-c", request["runner"], str(their_end), str(their_sink)],
            stdin=subprocess.DEVNULL,
            pass_fds=(their_end, their_sink),
        )
        os.close(their_end)
        os.close(their_sink)
        self.dead = False

    def ask(self, *message: object) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        try:
            Sender(buffer, protocol=4).dump(message)
        except Exception as error:
            raise UnsupportedError(f"a test passes what can't be sent: {error}") from error
        try:
            self.send(buffer.getvalue())
            reply = Receiver(io.BytesIO(self.receive()), self).load()
            kind = reply[0]
        except Exception as error:
            self.dead = True
            raise DiedError(self.epitaph(error)) from error
        if kind == "unsupported":
            raise UnsupportedError(f"a test passes what the program can't read: {reply[1]}")
        if kind == "raised":
            raise exception(reply[1], reply[2])
        return reply

    def epitaph(self, error: Exception) -> str:
        """How the program ended, for people."""
        if not isinstance(error, (EOFError, OSError)):
            return f"the program sent no data ({type(error).__name__})"
        with contextlib.suppress(subprocess.TimeoutExpired):
            return f"the program ended early, {fate(self.process.wait(1))}"
        return "the program closed its connection"

    def send(self, data: bytes) -> None:
        data = struct.pack("<Q", len(data)) + data
        while data:
            data = data[os.write(self.sink, data) :]

    def receive(self) -> bytes:
        size = struct.unpack("<Q", self.read(8))[0]
        if size > MESSAGE:
            raise DiedError("message too long")
        return self.read(size)

    def read(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            piece = os.read(self.source, min(count - len(data), 1 << 20))
            if not piece:
                raise EOFError
            data += piece
        return bytes(data)


class Remote:
    """A function, a class or an object of the program. Two of them are equal only when identical:
    equality is never the program's to decide."""

    def __init__(self, program: Program, target: str | int, path: tuple[str, ...] = ()) -> None:
        self.__dict__.update(_program=program, _target=target, _path=path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Remote(self._program, self._target, (*self._path, name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _, value, changed = self._program.ask("call", self._target, self._path, args, kwargs)
        for mine, theirs in zip(args, changed, strict=False):
            if theirs is not None:
                update(mine, theirs)
        return value

    def __iter__(self) -> Iterator[Any]:
        return iter(self._program.ask("list", self._target, self._path, (), {})[1])


def update(mine: Any, theirs: Any) -> None:
    """Show the test what the program did to its arguments."""
    if mine == theirs or type(mine) is not type(theirs):
        return
    if isinstance(mine, (list, bytearray)):
        mine[:] = theirs
    else:
        mine.clear()
        (mine.extend if hasattr(mine, "extend") else mine.update)(theirs)


class Sender(pickle.Pickler):
    def persistent_id(self, value: object) -> int | None:
        if isinstance(value, Remote):
            if value._path or isinstance(value._target, str):
                raise TypeError("a function of the program")
            return int(value._target)
        return None


class Receiver(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, program: Program) -> None:
        super().__init__(file)
        self.program = program

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("__main__", "Handle"):
            return lambda number: Remote(self.program, int(number))
        if name in DATA.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no data")
