"""The untrusted side of the sandbox: holds the program, answers calls of its functions.

Runs by itself (`python -I -S -c <this text> READ WRITE`), so it imports the standard library only.
Nothing here is trusted by the supervisor: what comes back is data, compared over there.
"""

import collections
import datetime
import decimal
import fractions
import io
import os
import pickle
import struct
import sys
import types
from typing import Any

PLAIN = (
    *(int, float, complex, bool, str, bytes, type(None), range),
    *(decimal.Decimal, fractions.Fraction),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
)
SCALARS: tuple[Any, ...] = (bool, int, float, str, bytes, bytearray)
CONTAINERS: tuple[Any, ...] = (tuple, list, set, frozenset, collections.deque)
objects: dict[int, object] = {}
"""Results that are no plain data: the supervisor names them by number."""


def main(source: int, sink: int) -> None:
    module = types.ModuleType("program")
    sys.modules["program"] = module
    while (request := receive(source)) is not None:
        try:
            reply = handle(request, module)
        except BaseException as error:  # sys.exit() in the program is an answer like any other
            reply = ("raised", type(error).__name__, str(error)[:500])
        send(sink, pickle.dumps(reply, protocol=4))


def handle(request: bytes, module: types.ModuleType) -> tuple[Any, ...]:
    try:
        what, *rest = Loader(request).load()
    except Exception as error:
        return ("unsupported", f"{type(error).__name__}: {error}")
    if what == "load":
        exec(compile(rest[0], "<program>", "exec"), module.__dict__)
        names = [name for name, value in vars(module).items() if callable(value)]
        return ("loaded", [name for name in names if not name.startswith("_")])
    target, path, args, kwargs = rest
    value: Any = getattr(module, target) if isinstance(target, str) else objects[target]
    for name in path:
        value = getattr(value, name)
    if what == "list":
        return ("value", portable(list(value)), ())
    result = value(*args, **kwargs)
    mutable = (list, dict, set, bytearray, collections.deque)
    changed = [portable(arg) if isinstance(arg, mutable) else None for arg in args]
    return ("value", portable(result), changed)


def portable(value: Any) -> Any:
    """Plain data as such (subclasses of the built-in types become those), the rest by number."""
    if type(value) in PLAIN:
        return value
    for base in SCALARS:
        if isinstance(value, base):
            return base(value)
    for base in CONTAINERS:
        if isinstance(value, base):
            return base(portable(item) for item in value)
    if isinstance(value, dict):
        return {portable(key): portable(item) for key, item in value.items()}
    objects[id(value)] = value
    return Handle(id(value))


class Handle:
    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.number,)


class Loader(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))

    def persistent_load(self, number: int) -> object:
        return objects[number]


def receive(fd: int) -> bytes | None:
    header = read_exactly(fd, 8)
    return None if header is None else read_exactly(fd, struct.unpack("<Q", header)[0])


def read_exactly(fd: int, count: int) -> bytes | None:
    data = b""
    while len(data) < count:
        piece = os.read(fd, min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return data


def send(fd: int, data: bytes) -> None:
    data = struct.pack("<Q", len(data)) + data
    while data:
        data = data[os.write(fd, data) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
