"""The server: one generator, and its requests in the order of their arrival, one or several at a time."""

from __future__ import annotations

import json
import socket
import time
import traceback
from collections.abc import AsyncIterator
from functools import partial
from typing import Any
from uuid import uuid4

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from flashmem.base.errors import RunError, UserError
from flashmem.base.streams import say
from flashmem.runtime.generation.batch import BatchGenerator
from flashmem.tools.server.clients import Client, ClientLeftError
from flashmem.tools.server.one_by_one import OneByOne
from flashmem.tools.server.pages import OwnPages
from flashmem.tools.server.protocol import Request, Responses, UnknownModelError, problem, read_request
from flashmem.tools.server.texts import begun

MOST_WAITING = 64
"""The most requests beyond those that are answered at a time."""

MOST_CONNECTIONS = 256


def listening(host: str, port: int) -> socket.socket:
    """A socket that listens at `host` and `port`; 0 for any free port. Raises UserError."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} of {host} cannot be used ({error}); name others with --host and --port") from error


def serve(generator: BatchGenerator, model: str, at: socket.socket) -> None:
    """Serve `generator` as `model` until the process is interrupted."""
    http_server(generator, model, at.getsockname()[0]).run(sockets=[at])


def http_server(generator: BatchGenerator, model: str, address: str) -> uvicorn.Server:
    """A server at `address` that is not running yet."""
    made = application(generator, model, address)
    return uvicorn.Server(
        uvicorn.Config(made, ws="none", limit_concurrency=MOST_CONNECTIONS, log_level="warning", access_log=False)
    )


def application(generator: BatchGenerator, model: str, address: str) -> Starlette:
    """The application at `address`, which refuses requests of strange web pages."""
    model_server = _ModelServer(generator, model)
    routes = [
        Route("/v1/models", model_server.models),
        Route("/v1/models/{name}", model_server.one_model),
        Route("/v1/completions", _Endpoint(model_server, chat=False), methods=["POST"]),
        Route("/v1/chat/completions", _Endpoint(model_server, chat=True), methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(OwnPages, address=address)])


class _ModelServer:
    """The endpoints of one model."""

    def __init__(self, generator: BatchGenerator, model: str) -> None:
        self._generator = generator
        self._model = model
        self._begun = int(time.time())
        self._reader = OneByOne("flashmem-requests")  # the event loop goes on while tokens are found
        self._open = 0
        self._most = MOST_WAITING + generator.rows

    async def models(self, request: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._about()]})

    async def one_model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        return JSONResponse(self._about()) if name == self._model else _error(f"there is no model {name!r} here", 404)

    def _about(self) -> dict[str, Any]:
        return {"id": self._model, "object": "model", "created": self._begun, "owned_by": "flashmem"}

    async def answer(self, http: HttpRequest, send: Send, *, chat: bool) -> None:
        """Answer a request for a text; the response ends before this does."""
        if self._open >= self._most:
            said = f"the server has {self._open} requests already; ask again later"
            await _error(said, 429)(http.scope, http.receive, send)
            return
        self._open += 1
        client = Client(http)
        try:
            try:
                response = await self._response(client, chat)
            except ClientLeftError:
                raise
            except Exception as error:
                response = _refusal(error)
            await response(http.scope, http.receive, send)
        except ClientLeftError:
            pass
        finally:
            self._open -= 1
            client.close()

    async def _response(self, client: Client, chat: bool) -> Response:
        """The response to a request; a streamed one generates its text when it is sent. Raises any error."""
        body = await client.body()
        wanted, tokens = await client.wait(self._reader.begin(partial(self._read, body, chat)))
        responses = Responses(wanted, self._model, uuid4().hex, int(time.time()))
        if wanted.stream:
            return _Events(self._events(wanted, tokens, responses, client))
        with begun(self._generator, tokens, wanted, client) as text:
            whole = "".join([piece async for piece in text.pieces()])
            return JSONResponse(responses.whole(whole, text.report))

    def _read(self, body: bytes, chat: bool) -> tuple[Request, list[int]]:
        """The request in a body, and the tokens of its prompt. Raises UserError."""
        try:
            content = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise UserError(f"the body is no JSON ({error})") from error
        generator = self._generator
        wanted = read_request(content, chat=chat, model=self._model, recommended=generator.language.sampling)
        return wanted, generator.tokens_of(wanted.prompt, wanted.template_arguments)

    async def _events(self, wanted: Request, tokens: list[int], responses: Responses, client: Client) -> AsyncIterator[str]:
        """A streamed response: server-sent events."""
        try:
            with begun(self._generator, tokens, wanted, client) as text:
                if (first := responses.first()) is not None:
                    yield _event(first)
                async for piece in text.pieces():
                    yield _event(responses.piece(piece))
            yield _event(responses.last(text.report))
            if wanted.with_usage:
                yield _event(responses.usage(text.report))
            yield "data: [DONE]\n\n"
        except ClientLeftError:
            raise
        except Exception as error:
            yield _event(problem(_failure(error), 500))


class _Endpoint:
    """An endpoint for texts, as an application: it knows when its response was sent."""

    def __init__(self, server: _ModelServer, *, chat: bool) -> None:
        self._server = server
        self._chat = chat

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._server.answer(HttpRequest(scope, receive), send, chat=self._chat)


class _Events(StreamingResponse):
    """Server-sent events of a generator that notices itself when the client leaves."""

    def __init__(self, events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self._events: Any = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        except OSError as error:  # some servers say so that the client has left
            raise ClientLeftError from error
        finally:
            await self._events.aclose()


def _refusal(error: Exception) -> Response:
    """The response to a request that cannot be answered."""
    if isinstance(error, UserError):
        return _error(str(error), 404 if isinstance(error, UnknownModelError) else 400)
    return _error(_failure(error), 500)


def _failure(error: Exception) -> str:
    """What a client hears of a failure: nothing about this machine, which only the output of the server tells."""
    if isinstance(error, RunError):
        say(f"a request failed: {error}")
    else:
        traceback.print_exception(error)
    return "the server could not answer; its own output says why"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def _error(said: str, status: int) -> JSONResponse:
    return JSONResponse(problem(said, status), status)
