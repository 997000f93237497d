"""The client of a request: the body that it sends, and whether it is still there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from flashmem.base.errors import UserError

MOST_BYTES = 4 << 20
MOST_SECONDS = 60
"""The longest body of a request, and the longest time until it is there."""

_Result = TypeVar("_Result")


class ClientLeftError(Exception):
    """The client has closed its connection."""


class Client:
    """The client of a request."""

    def __init__(self, http: Request) -> None:
        self._http = http
        self._leaves: asyncio.Future[None] | None = None

    async def body(self) -> bytes:
        """The body; to be called first, once.

        Raises:
            UserError: it is too long, or comes too slowly.
            ClientLeftError: the client has left.
        """
        body = bytearray()
        try:
            async with asyncio.timeout(MOST_SECONDS):
                async for part in self._http.stream():
                    body += part
                    if len(body) > MOST_BYTES:
                        raise UserError(f"the body has more than {MOST_BYTES} bytes")
        except TimeoutError as error:
            raise UserError(f"the body took more than {MOST_SECONDS} s") from error
        except ClientDisconnect as error:
            raise ClientLeftError from error
        self._leaves = asyncio.ensure_future(_wait_until_left(self._http.receive))
        return bytes(body)

    async def wait(self, work: Awaitable[_Result]) -> _Result:
        """The result of `work`, which is cancelled when the client leaves. Raises ClientLeftError."""
        assert self._leaves is not None
        future = asyncio.ensure_future(work)
        either: set[asyncio.Future[Any]] = {future, self._leaves}
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._leaves.done():
                raise ClientLeftError
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Look no longer whether it leaves."""
        if self._leaves is not None:
            self._leaves.cancel()


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
