"""JSON over HTTP to one of several endpoints: balance, time-out, retries, failover.

A request goes to the endpoint with the fewest requests under way. An endpoint that fails rests for
backoff · 2^k seconds (k failures in a row; at most `LONGEST_REST`), and the request goes to another
one at once; when all rest, it waits for the first to come back, and a little longer at random, so
that waiting requests don't arrive together.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

import httpx

from rlx.core.errors import ComponentError, UsageError
from rlx.core.rewards import excerpt

LONGEST_REST = 8.0
"""Seconds that an endpoint rests, at most (a server may ask for more with `Retry-After`)."""
_MOST_ASKED_REST = 60.0
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses after which the same request may succeed."""
_START_ATTEMPTS = 5
_LOCAL = ("all://localhost", "all://127.0.0.1", "all://[::1]")


class HttpPool:
    """Posts JSON to whichever of the endpoints answers.

    Args:
        urls: what is posted to, `http://host:port/path`.
        token_env: environment variable that holds the bearer token.
        timeout: seconds for one attempt.
        retries: further attempts of a request.
        backoff: seconds that an endpoint rests after its first failure.

    Raises `UsageError` for an address that is none, and for a variable that isn't set.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token_env: str | None,
        timeout: float,
        retries: int,
        backoff: float,
    ) -> None:
        if not urls:
            raise UsageError("there is no endpoint", fix="give `url` at least one address")
        self._endpoints = [_Endpoint(_checked(url), backoff) for url in urls]
        self._headers = {"Content-Type": "application/json", **_authorization(token_env)}
        self._token_env = token_env
        self._timeout = timeout
        self._attempts = retries + 1
        self._backoff = backoff
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = (
            WeakKeyDictionary()
        )
        self._random = random.Random()  # the global one belongs to the run's seed

    async def post(self, body: bytes, *, key: str) -> Any:
        """Return the parsed answer.

        Args:
            key: names the request, so that a server that keeps answers doesn't do it twice.

        Raises:
            UsageError: the server refuses the request; to send it again would not help.
            ComponentError: no endpoint answered in all attempts.
        """
        client = self._client()
        failures: dict[str, str] = {}
        for _ in range(self._attempts):
            endpoint = await self._next()
            endpoint.running += 1
            try:
                answer = await self._once(client, endpoint.url, body, key)
            except _PassingError as error:
                endpoint.failed(error.rest)
                failures[endpoint.url] = str(error)
            else:
                endpoint.answered()
                return answer
            finally:
                endpoint.running -= 1
        raise ComponentError(_no_answer(self._attempts, failures))

    def check(self, body: bytes, *, key: str) -> None:
        """Ask all until one answers; raises `UsageError` when one refuses or none answers."""
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may run a loop of its own
            failures = thread.submit(asyncio.run, self._ask_all(body, key)).result()
        if failures:
            raise UsageError(
                _no_answer(min(self._attempts, _START_ATTEMPTS), failures),
                where="url",
                fix="start the server, or correct the address",
            )

    async def _ask_all(self, body: bytes, key: str) -> dict[str, str]:
        """Why each endpoint didn't answer; empty when one did."""
        failures: dict[str, str] = {}
        async with self._new_client() as client:
            for attempt in range(min(self._attempts, _START_ATTEMPTS)):
                if attempt:
                    await asyncio.sleep(min(self._backoff * 2 ** (attempt - 1), LONGEST_REST))
                answers = (self._once(client, one.url, body, key) for one in self._endpoints)
                outcomes = await asyncio.gather(*answers, return_exceptions=True)
                for endpoint, outcome in zip(self._endpoints, outcomes, strict=True):
                    if isinstance(outcome, _PassingError):
                        failures[endpoint.url] = str(outcome)
                    elif isinstance(outcome, BaseException):
                        raise outcome
                if not all(isinstance(outcome, _PassingError) for outcome in outcomes):
                    return {}
        return failures

    async def _next(self) -> _Endpoint:
        """The endpoint for the next attempt, once it has rested."""
        now = time.monotonic()
        rested = [endpoint for endpoint in self._endpoints if endpoint.rests_until <= now]
        if rested:
            least = min(endpoint.running for endpoint in rested)
            return self._random.choice([one for one in rested if one.running == least])
        first = min(self._endpoints, key=lambda endpoint: endpoint.rests_until)
        rest = first.rests_until - now
        await asyncio.sleep(rest + self._random.uniform(0, rest / 4))
        return first

    async def _once(self, client: httpx.AsyncClient, url: str, body: bytes, key: str) -> Any:
        headers = {**self._headers, "Idempotency-Key": key}
        try:
            async with asyncio.timeout(self._timeout):  # httpx limits each read, not the whole
                response = await client.post(url, content=body, headers=headers)
        except TimeoutError:
            raise _PassingError(f"no answer within {self._timeout:g} s") from None
        except httpx.TransportError as error:
            raise _PassingError(f"{type(error).__name__} {error}".strip()) from None
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise UsageError(f"{url}: {type(error).__name__} {error}", where="url") from None
        if response.status_code in _PASSING:
            raise _PassingError(_reason(response), rest=_retry_after(response))
        if response.status_code != 200:
            raise self._refused(url, response)
        try:
            return response.json()
        except ValueError as error:
            raise UsageError(
                f"{url} answers no JSON ({error}): {excerpt(response.text, 120)}",
                where="url",
                fix="the address of a server that speaks the protocol",
            ) from None

    def _refused(self, url: str, response: httpx.Response) -> UsageError:
        if response.status_code in (401, 403):
            where = f"the environment variable {self._token_env}" if self._token_env else None
            fix = (
                "the token that the server was started with"
                if where
                else "`token_env`: the environment variable that holds the server's token"
            )
            return UsageError(f"{url} refuses access: {_reason(response)}", where=where, fix=fix)
        fix = "send fewer samples in one request (`scope`), or raise the server's limit"
        return UsageError(
            f"{url} refuses the request: {_reason(response)}",
            where="url",
            fix=fix if response.status_code == 413 else None,
        )

    def _client(self) -> httpx.AsyncClient:
        """A client for the running loop: connections can't be shared between loops."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = self._new_client()
        return self._clients[loop]

    def _new_client(self) -> httpx.AsyncClient:
        mounts: Mapping[str, None] = dict.fromkeys(_LOCAL)  # never through a proxy
        return httpx.AsyncClient(timeout=self._timeout, mounts=mounts, limits=_UNLIMITED)


_UNLIMITED = httpx.Limits(max_connections=None, max_keepalive_connections=20)
"""How many requests run at once is bounded by who calls."""


class _PassingError(Exception):
    """A failure that another attempt may not meet."""

    def __init__(self, reason: str, *, rest: float | None = None) -> None:
        super().__init__(reason)
        self.rest = rest


class _Endpoint:
    def __init__(self, url: str, backoff: float) -> None:
        self.url = url
        self.running = 0
        self.rests_until = 0.0
        self._backoff = backoff
        self._failures = 0

    def failed(self, asked: float | None) -> None:
        """Rest, longer after each failure; those that come in while it rests are the same one."""
        now = time.monotonic()
        if now < self.rests_until:
            return
        rest = min(self._backoff * 2**self._failures, LONGEST_REST)
        self.rests_until = now + (rest if asked is None else asked)
        self._failures = min(self._failures + 1, 30)

    def answered(self) -> None:
        self._failures = 0
        self.rests_until = 0.0


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise UsageError(f"{url!r} is no address: {error}", where="url") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(
            f"{url!r} is no address", where="url", fix="http://HOST:PORT or https://HOST"
        )
    return url


def _authorization(token_env: str | None) -> dict[str, str]:
    if token_env is None:
        return {}
    token = os.environ.get(token_env, "").strip()
    if not token:
        raise UsageError(
            f"the environment variable {token_env} is not set where rewards run",
            where="token_env",
            fix=f"export {token_env}=…",
        )
    return {"Authorization": f"Bearer {token}"}


def _no_answer(attempts: int, failures: Mapping[str, str]) -> str:
    reasons = "; ".join(f"{url}: {reason}" for url, reason in failures.items())
    tries = "one attempt" if attempts == 1 else f"{attempts} attempts"
    return f"no answer in {tries}: {reasons}"


def _reason(response: httpx.Response) -> str:
    """Status and message: `401: wrong token`."""
    text = response.text
    try:
        error = json.loads(text)["error"]
        text = str(error["message"] if isinstance(error, Mapping) else error)
    except (ValueError, KeyError, TypeError):
        pass
    return f"{response.status_code} {response.reason_phrase}: {excerpt(text)}".rstrip(": ")


def _retry_after(response: httpx.Response) -> float | None:
    try:
        seconds = float(response.headers.get("Retry-After", ""))
    except ValueError:  # not given, or a date
        return None
    return min(seconds, _MOST_ASKED_REST) if math.isfinite(seconds) and seconds >= 0 else None
