"""What HTTP servers of rlx have in common: bearer tokens, bounded JSON bodies, refusals."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable, Mapping
from typing import Any


class RefusedError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def bearer_token(headers: Mapping[str, str]) -> str:
    """The token of `Authorization: Bearer TOKEN`; raises RefusedError (401) where there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not given:
        raise unauthorized("a token is needed: Authorization: Bearer TOKEN")
    if scheme.lower() != "bearer":
        raise unauthorized(f"this server takes bearer tokens, not {scheme[:20]!r}")
    return given.strip()


def unauthorized(message: str) -> RefusedError:
    """The answer to a request without the right token."""
    return RefusedError(401, message, WWW_Authenticate="Bearer")


async def read_json(
    headers: Mapping[str, str], chunks: AsyncIterable[bytes], *, most: int, hint: str = ""
) -> bytes:
    """The body of a JSON request; raises RefusedError for another type and for more bytes.

    Args:
        most: bytes.
        hint: how more may be allowed, for the error.
    """
    # A page in a browser can send other types to this machine's servers without being asked.
    if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise RefusedError(415, "send the header Content-Type: application/json")
    too_large = RefusedError(413, f"a request has at most {most / 2**20:g} MiB{hint}")
    announced = headers.get("content-length", "")
    if announced.isdigit() and int(announced) > most:
        raise too_large
    body = bytearray()
    async for chunk in chunks:
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
