"""The HTTP server of a run's sessions: one address, a token for each episode.

It runs in the event loop of the episodes that it serves, so that a request is an engine call like
any other. The token says which episode a request belongs to, and nothing else does: a program can
reach the tokens of its own episode only.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import json
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from rlx.core.episode import ContextExceeded, Episode, EpisodeEnded
from rlx.core.errors import ComponentError
from rlx.core.http_server import (
    RefusedError,
    as_json,
    bearer_token,
    read_json,
    shown_url,
    unauthorized,
)
from rlx.plugins.agents.endpoint import anthropic, chat, completions
from rlx.plugins.agents.endpoint.requests import (
    Asked,
    OtherSampling,
    UnsupportedError,
    check_sampling,
    parsed,
)
from rlx.plugins.agents.endpoint.texts import Texts

_MAX_BODY = 64 * 2**20
_BACKLOG = 4096
"""Connections that may wait: as many episodes may begin at once."""
_MOST_FILES = 65_536
_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs."""

A = TypeVar("A", bound=Asked)
Handler = Callable[[A, Episode, Texts], Awaitable[dict[str, Any]]]


class Endpoint:
    """Serves the episodes that are open.

    Args:
        texts: the tokenizer and the format of tool calls.
        model: what `/v1/models` calls the policy.
        other_sampling: what is done about requests for another temperature than the run's.
        host: where it listens; anything but a loopback address is reachable by other machines.
        port: 0 for any.
    """

    def __init__(
        self,
        texts: Texts,
        *,
        model: str = "policy",
        other_sampling: OtherSampling = "refuse",
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self._texts = texts
        self._model = model
        self._other_sampling: OtherSampling = other_sampling
        self._address = (host, port)
        self._episodes: dict[str, Episode] = {}
        self._serving: asyncio.Task[None] | None = None
        self.url = ""
        """Without `/v1`; empty until it listens."""

    def start(self) -> None:
        """Listen. Raises ComponentError where the address can't be had."""
        host, port = self._address
        _allow_connections()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ComponentError(
                f"the agent's endpoint can't listen on {host}:{port}: {error.strerror}"
            ) from error
        self.url = shown_url(host, listening.getsockname()[1])
        # Requests wait in the socket's backlog until the server has started.
        # It is no part of the agent that happens to be the first.
        self._serving = asyncio.get_running_loop().create_task(
            _serve(self._app(), listening), context=contextvars.Context()
        )

    async def stop(self) -> None:
        """Close every connection."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait({self._serving})

    @contextlib.contextmanager
    def session(self, episode: Episode) -> Iterator[str]:
        """Serve an episode; gives its token, which is worth nothing afterwards."""
        token = f"rlx-{secrets.token_urlsafe(24)}"
        self._episodes[token] = episode
        try:
            yield token
        finally:
            del self._episodes[token]

    def _episode_of(self, request: Request) -> Episode:
        token = request.headers.get("x-api-key") or bearer_token(request.headers)
        episode = self._episodes.get(token)
        if episode is None:
            raise unauthorized("no episode that is under way has this token")
        return episode

    def _app(self) -> FastAPI:
        app = FastAPI(title="rlx agent endpoint", docs_url=None, redoc_url=None, openapi_url=None)
        app.add_exception_handler(RefusedError, _refuse)

        @app.post("/v1/chat/completions")
        async def chat_completions(request: Request) -> Response:
            asked, whole = await self._answer(request, chat.ChatAsked, chat.answer)
            return _sent(asked, whole, chat.chunks(whole, with_usage=_with_usage(asked)))

        @app.post("/v1/completions")
        async def text_completions(request: Request) -> Response:
            asked, whole = await self._answer(
                request, completions.CompletionAsked, completions.complete
            )
            return _sent(asked, whole, completions.chunks(whole, with_usage=_with_usage(asked)))

        @app.post("/v1/messages")
        async def messages(request: Request) -> Response:
            asked, whole = await self._answer(request, anthropic.MessagesAsked, anthropic.answer)
            return _sent(asked, whole, anthropic.events(whole))

        @app.get("/v1/models")
        async def models(request: Request) -> dict[str, Any]:
            self._episode_of(request)
            return {"object": "list", "data": [_model(self._model)]}

        @app.get("/v1/models/{name:path}")
        async def model(request: Request, name: str) -> dict[str, Any]:
            self._episode_of(request)
            if name != self._model:
                raise RefusedError(404, f"there is no model {name!r}, only {self._model!r}")
            return _model(name)

        return app

    async def _answer(
        self, request: Request, kind: type[A], handler: Handler[A]
    ) -> tuple[A, dict[str, Any]]:
        """The request, and the whole answer to it; raises RefusedError for all that goes wrong."""
        episode = self._episode_of(request)
        body = await read_json(request.headers, request.stream(), most=_MAX_BODY)
        asked = parsed(kind, as_json(body))
        check_sampling(asked, episode, self._other_sampling)
        try:
            return asked, await handler(asked, episode, self._texts)
        except ContextExceeded as error:
            raise UnsupportedError("messages", str(error), code="context_length_exceeded") from None
        except EpisodeEnded as ended:
            raise RefusedError(400, f"the episode has ended: {ended.reason}") from None
        except ComponentError as error:
            raise RefusedError(400, str(error)) from None
        except Exception as error:
            if error is not episode.engine_error:
                raise
            raise RefusedError(500, f"the engine failed: {error}") from None


_listening: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Any, Endpoint]] = WeakKeyDictionary()


def listening(texts: Texts, **options: Any) -> Endpoint:
    """The running loop's endpoint with these options (those of `Endpoint`), started if need be.

    It ends with the loop. Raises ComponentError where the address can't be had.
    """
    key = (id(texts.tokenizer), texts.parse, *sorted(options.items()))
    endpoints = _listening.setdefault(asyncio.get_running_loop(), {})
    if key not in endpoints:
        endpoint = Endpoint(texts, **options)
        endpoint.start()
        endpoints[key] = endpoint
    return endpoints[key]


def _allow_connections() -> None:
    """Raise the limit on open files as far as it goes: every program holds connections, of which
    this process often has both ends."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Server(uvicorn.Server):
    """In a loop that is somebody else's, signals are somebody else's too."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(app: FastAPI, listening: socket.socket) -> None:
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        backlog=_BACKLOG,
        timeout_keep_alive=_KEEP_ALIVE,
    )
    server = _Server(config)
    try:
        await server.serve(sockets=[listening])
    except asyncio.CancelledError:
        server.force_exit = True
        await server.shutdown(sockets=[listening])
    finally:
        listening.close()


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    """The error in the format of the API that was asked; clients shall not try again."""
    assert isinstance(error, RefusedError)
    kind = {401: "authentication_error", 404: "not_found_error", 500: "api_error"}.get(
        error.status, "invalid_request_error"
    )
    detail: dict[str, Any] = {"type": kind, "message": str(error)}
    whole: Mapping[str, Any]
    if request.url.path == "/v1/messages":
        whole = {"type": "error", "error": detail}
    else:
        more: dict[str, str | None] = {"param": None, "code": None}
        if isinstance(error, UnsupportedError):
            more = {"param": error.field, "code": error.code}
        whole = {"error": {**detail, **more}}
    return _Json(whole, error.status, {**error.headers, "x-should-retry": "false"})


class _Json(JSONResponse):
    """In ASCII: a model may write half a surrogate pair into a tool call, and UTF-8 has none."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":")).encode()


def _sent(asked: Asked, whole: Mapping[str, Any], events: Iterator[str]) -> Response:
    if not asked.stream:
        return _Json(whole)

    async def stream() -> AsyncIterator[str]:
        for event in events:
            yield event

    return StreamingResponse(stream(), media_type="text/event-stream")


def _with_usage(asked: chat.ChatAsked | completions.CompletionAsked) -> bool:
    return bool((asked.stream_options or {}).get("include_usage"))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(time.time()), "owned_by": "rlx"}
