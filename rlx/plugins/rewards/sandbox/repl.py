"""The untrusted side of a session: runs pieces of code one after the other in one namespace.

Runs by itself (`python -I -S -c <this text> LIMIT`), so it imports the standard library only. Reads
JSON lines `{"code": …}`, writes JSON lines `{"text": …, "failed": …}`: what the code printed, the
value of a last expression, or the end of a traceback.
"""

import ast
import contextlib
import io
import json
import os
import sys
import traceback
from typing import Any

_NAME = "<code>"


class Printed(io.StringIO):
    """Keeps the first and the last characters of what is written; a flood costs no memory."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        self.length = 0
        self.tail = ""

    def write(self, text: str) -> int:
        self.length += len(text)
        room = self.limit - self.tell()
        super().write(text[:room])
        if len(text) > room:
            self.tail = (self.tail + text[room:][-self.limit :])[-self.limit // 2 :]
        return len(text)

    def text(self) -> str:
        kept = self.getvalue()
        if self.length <= self.limit:
            return kept
        head = kept[: self.limit // 2]
        lost = self.length - len(head) - len(self.tail)
        if lost <= 0:
            return kept + self.tail[-(self.length - self.limit) :]
        return f"{head}\n[… {lost:,} characters left out …]\n{self.tail}"


def main(limit: int) -> None:
    requests = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1):
        os.dup2(null, fd)
    scope: dict[str, Any] = {"__name__": "__main__"}
    for line in requests:
        printed = Printed(limit)
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            failed = not run(json.loads(line)["code"], scope)
        reply = {"text": printed.text(), "failed": failed}
        replies.write(json.dumps(reply).encode() + b"\n")
        replies.flush()


def run(code: str, scope: dict[str, Any]) -> bool:
    """Run code as a notebook's cell; says whether it raised nothing."""
    try:
        tree = ast.parse(code, _NAME)
        last = tree.body[-1] if tree.body else None
        if isinstance(last, ast.Expr):
            del tree.body[-1]
        exec(compile(tree, _NAME, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), _NAME, "eval"), scope)
            if value is not None:
                print(repr(value))
    except BaseException as error:  # sys.exit() ends the piece of code, not the session
        print(explain(error))
        return False
    return True


def explain(error: BaseException) -> str:
    """A traceback without this file's own frames."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
        trace = trace.tb_next
    lines = traceback.format_exception(type(error), error, trace, limit=-4, chain=False)
    return "".join(lines).rstrip()


if __name__ == "__main__":
    main(int(sys.argv[1]))
