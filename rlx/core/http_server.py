"""What HTTP servers of rlx have in common: bearer tokens, bounded bodies, a clean start and end."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that it is never
the server that closes one on which a request is under way."""


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def bearer_token(request: Request) -> str:
    """The token of `Authorization: Bearer TOKEN`; raises RefusedError (401) where there is none."""
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    if not given:
        raise unauthorized("a token is needed: Authorization: Bearer TOKEN")
    if scheme.lower() != "bearer":
        raise unauthorized(f"this server takes bearer tokens, not {scheme[:20]!r}")
    return given.strip()


def unauthorized(message: str) -> RefusedError:
    """The answer to a request without the right token."""
    return RefusedError(401, message, WWW_Authenticate="Bearer")


async def read_body(request: Request, most: int, *, setting: str) -> bytes:
    """The body of a JSON request; raises RefusedError for another type and for more bytes.

    Args:
        most: bytes.
        setting: what the error names as the way to allow more.
    """
    # A page in a browser can send other types to this machine's servers without being asked.
    if request.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
        raise RefusedError(415, "send the header Content-Type: application/json")
    too_large = RefusedError(413, f"a request has at most {most / 2**20:g} MiB ({setting})")
    announced = request.headers.get("Content-Length", "")
    if announced.isdigit() and int(announced) > most:
        raise too_large
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            raise too_large
    return bytes(body)


def as_json(body: bytes) -> Any:
    """The value of a JSON body; raises RefusedError (400) for anything else."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"the request is not JSON: {error}") from None


def shown_url(host: str, port: int) -> str:
    """The URL of a server, an IPv6 address in brackets."""
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class ListeningServer(uvicorn.Server):
    """A server that says where it listens.

    Args:
        grace: seconds that requests under way have when it is asked to end.
        listening: told the URL.
    """

    def __init__(
        self, app: FastAPI, *, host: str, port: int, grace: int, listening: Callable[[str], None]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_level="warning",
                access_log=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=grace,
            )
        )
        self._listening = listening

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.servers:
            host, port, *_ = self.servers[0].sockets[0].getsockname()
            self._listening(shown_url(host, port))
