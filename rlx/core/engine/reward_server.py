"""The HTTP face of a `RewardService`: a token, limits, and errors that say what to change."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from rlx.core.engine.reward_service import ConflictError, OverloadedError, RewardService
from rlx.core.errors import EngineError
from rlx.core.http_server import (
    RefusedError,
    as_json,
    bearer_token,
    read_json,
    shown_url,
    unauthorized,
)
from rlx.core.reward_protocol import ScoreReply, ScoreRequest, first_problem

_KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that it is never
the server that closes one on which a request is under way."""


def make_app(service: RewardService, *, token: str | None, max_body: int) -> FastAPI:
    """Return the application.

    Args:
        token: what `Authorization: Bearer …` must carry; None: anyone may ask.
        max_body: bytes of a request, at most.
    """

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    app = FastAPI(title="rlx serve-reward", lifespan=lifespan)

    @app.exception_handler(RefusedError)
    async def refuse(_: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, error.status, error.headers)

    @app.post("/score", openapi_extra=_BODY, response_model=ScoreReply)
    async def score(request: Request) -> JSONResponse:
        _check_token(request, token)
        body = await read_json(
            request.headers, request.stream(), most=max_body, hint=" (--max-body-mib)"
        )
        wanted = _parse(body)
        samples = [sample.inputs() for sample in wanted.samples]
        content = hashlib.sha256(body).digest()
        try:
            rewards = await service.score(samples, key=wanted.id, content=content)
        except ConflictError as error:
            raise RefusedError(409, str(error)) from None
        except OverloadedError as error:
            raise RefusedError(503, str(error), Retry_After="1") from None
        except EngineError as error:
            raise RefusedError(500, str(error)) from None
        return JSONResponse({"rewards": rewards})

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/rewards")
    async def rewards(request: Request) -> dict[str, Any]:
        _check_token(request, token)
        weights = dict(zip(service.names, service.weights, strict=True))
        return {"rewards": weights, "counts": dict(service.counts)}

    return app


_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": ScoreRequest.model_json_schema()}},
    }
}


def _check_token(request: Request, token: str | None) -> None:
    if token is None:
        return
    if not hmac.compare_digest(bearer_token(request.headers).encode(), token.encode()):
        raise unauthorized("wrong token")


def _parse(body: bytes) -> ScoreRequest:
    value = as_json(body)
    try:
        return ScoreRequest.model_validate(value)
    except ValidationError as error:
        raise RefusedError(422, first_problem(error)) from None


class Server(uvicorn.Server):
    """A server that says when it listens, and ends with 0 when it is asked to end.

    SIGTERM and Ctrl-C: no new request is taken, those under way are answered, for `grace` seconds
    at most. A second signal ends at once.
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

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again at the end, and the exit code would be no 0."""
        numbers = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
