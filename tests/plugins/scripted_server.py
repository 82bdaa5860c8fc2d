"""An HTTP server on loopback that answers as a test says, and remembers what it was asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""Status, body (JSON unless it is bytes), headers."""


@dataclass
class Scripted:
    """A running server."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies, in the order of their arrival."""
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


Script = Callable[[dict[str, Any], int], Answer]
"""Gives the answer to a body and the number of the request, from 0."""


@contextmanager
def serving(script: Script, *, port: int = 0) -> Iterator[Scripted]:
    """Serve until the block ends; requests that are still under way are dropped."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(state.requests)
                state.requests.append(body)
                state.headers.append(dict(self.headers))
                state.paths.append(self.path)
            status, answer, *more = script(body, number)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            try:
                self.send_response(status)
                for name, value in (more[0] if more else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the caller gave up
                self.close_connection = True

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    state = Scripted(url=f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def lengths(body: dict[str, Any], _: int = 0) -> Answer:
    """Reward servers' script: the length of the response."""
    return 200, {"rewards": [{"score": float(len(s["response"]))} for s in body["samples"]]}
