"""The server: one generator, and its requests in the order of their arrival, one or several at a time."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from flashmem.base.errors import RunError, UserError
from flashmem.runtime.generation.batch import BatchGenerator
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.runtime.generation.generator import Generator
from flashmem.tools.server.protocol import Request, Responses, read_request

MOST_BYTES = 16 << 20
"""The longest body of a request."""

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; 0 for any free port. Raises UserError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} of {host} cannot be used ({error}); name others with --host and --port") from error


def serve(generator: Generator | BatchGenerator, model: str, at: socket.socket) -> None:
    """Serve `generator` as `model` until the process is interrupted."""
    host = at.getsockname()[0]
    server = uvicorn.Server(uvicorn.Config(application(generator, model, host), log_level="warning", access_log=False))
    server.run(sockets=[at])


def application(generator: Generator | BatchGenerator, model: str, host: str) -> Starlette:
    """The application. At a loopback address it refuses requests that name another host, as those of a strange web page may."""
    model_server = _ModelServer(generator, model)
    allowed = [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]
    routes = [
        Route("/v1/models", model_server.models),
        Route("/v1/models/{name}", model_server.one_model),
        Route("/v1/completions", model_server.completions, methods=["POST"]),
        Route("/v1/chat/completions", model_server.chat, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=allowed)])


@dataclass(frozen=True)
class _Pieces:
    """The pieces of a text as they are generated, and the report about it, which is there afterwards."""

    texts: AsyncIterator[str]
    report_of: Callable[[], GenerationReport | None]

    @property
    def report(self) -> GenerationReport:
        report = self.report_of()
        assert report is not None
        return report


class _ModelServer:
    """The endpoints of one model."""

    def __init__(self, generator: Generator | BatchGenerator, model: str) -> None:
        self._generator, self._model, self._begun = generator, model, int(time.time())
        self._turn = asyncio.Lock()  # waiting requests get it in the order of their arrival

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def one_model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._about()) if name == self._model else _error(f"there is no model {name!r} here", 404)

    async def completions(self, request: HttpRequest) -> Response:
        return await self._answered(request, chat=False)

    async def chat(self, request: HttpRequest) -> Response:
        return await self._answered(request, chat=True)

    def _about(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._begun, "owned_by": "flashmem"}

    async def _answered(self, http: HttpRequest, *, chat: bool) -> Response:
        try:
            wanted = read_request(await _body(http), chat=chat, model=self._model)
            tokens = self._generator.tokens_of(wanted.prompt)  # a prompt is refused before the response begins
        except LookupError as error:
            return _error(str(error.args[0]), 404)
        except UserError as error:
            return _error(str(error), 400)
        responses = Responses(wanted, self._model, uuid4().hex, int(time.time()))
        if wanted.stream:
            return StreamingResponse(self._events(wanted, tokens, responses), media_type="text/event-stream")
        try:
            async with self._pieces(wanted, tokens) as pieces:
                text = "".join([piece async for piece in pieces.texts])
                return JSONResponse(responses.whole(text, pieces.report))
        except (UserError, RunError) as error:
            return _error(str(error), 400 if isinstance(error, UserError) else 500)

    async def _events(self, wanted: Request, tokens: list[int], responses: Responses) -> AsyncIterator[str]:
        """A streamed response: server-sent events."""
        try:
            async with self._pieces(wanted, tokens) as pieces:
                if (first := responses.first()) is not None:
                    yield _event(first)
                async for piece in pieces.texts:
                    yield _event(responses.piece(piece))
                report = pieces.report
            yield _event(responses.last(report))
            if wanted.with_usage:
                yield _event(responses.usage(report))
            yield "data: [DONE]\n\n"
        except (UserError, RunError) as error:
            yield _event(_problem(str(error), "invalid_request_error" if isinstance(error, UserError) else "server_error"))

    @asynccontextmanager
    async def _pieces(self, wanted: Request, tokens: list[int]) -> AsyncIterator[_Pieces]:
        """A text, made in a thread: in a batch, or when it is this request's turn. A client that leaves ends the generation."""
        generator = self._generator
        options: dict[str, Any] = {
            "max_new_tokens": wanted.max_new_tokens, "temperature": wanted.temperature, "top_p": wanted.top_p,
            "seed": wanted.seed, "stop": wanted.stop,
        }  # fmt: skip
        if isinstance(generator, BatchGenerator):
            batched = generator.generate(tokens, **options)
            try:
                yield _Pieces(_from_thread(batched), lambda: batched.report)
            finally:
                batched.close()
            return
        async with self._turn:
            made = generator.generate(tokens, **options)
            try:
                yield _Pieces(_from_thread(made), lambda: generator.last)
            finally:
                made.close()  # type: ignore[attr-defined]


async def _from_thread(pieces: Iterator[str]) -> AsyncIterator[str]:
    while (piece := await run_in_threadpool(next, pieces, None)) is not None:
        yield piece


async def _body(http: HttpRequest) -> Any:
    """The JSON of a request. Raises UserError."""
    body = b""
    async for part in http.stream():
        body += part
        if len(body) > MOST_BYTES:
            raise UserError(f"the body has more than {MOST_BYTES} bytes")
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(f"the body is no JSON ({error})") from error


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _problem(said: str, kind: str) -> dict[str, Any]:
    return {"error": {"message": said, "type": kind, "param": None, "code": None}}


def _error(said: str, status: int) -> JSONResponse:
    return JSONResponse(_problem(said, "server_error" if status >= 500 else "invalid_request_error"), status)
