"""Texts in the making: threads generate them, the event loop gives them to clients, and a client that leaves ends its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

from flashmem.base.errors import RunError, UserError
from flashmem.runtime.generation.batch import BatchGenerator
from flashmem.runtime.generation.generated_text import GenerationReport
from flashmem.runtime.generation.generator import Generator
from flashmem.tools.server.clients import Client
from flashmem.tools.server.one_by_one import OneByOne
from flashmem.tools.server.protocol import Request

_Piece = str | GenerationReport | BaseException | None


class Text:
    """A text that is generated for a client.

    `report_of` gives the report where the end comes without it. `is_over`: nobody needs further pieces.
    """

    def __init__(self, client: Client) -> None:
        self._client, self._loop = client, asyncio.get_running_loop()
        self._arrived = asyncio.Queue[_Piece]()
        self._report: GenerationReport | None = None
        self.report_of: Callable[[], GenerationReport | None] = lambda: None
        self.is_over = False

    @property
    def report(self) -> GenerationReport:
        """About the text, once all pieces were given."""
        assert self._report is not None
        return self._report

    def put(self, piece: _Piece) -> None:
        """Give a piece, the report or None at the end, or an error; from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, piece)

    def end(self, made: asyncio.Future[GenerationReport | None]) -> None:
        """Give what a thread has returned or raised, unless that was cancelled."""
        if not made.cancelled():
            self.put(made.exception() or made.result())

    async def pieces(self) -> AsyncIterator[str]:
        """The pieces as they arrive. Raises ClientLeftError, and what ended the generation; its options were checked before."""
        while isinstance(piece := await self._client.wait(self._arrived.get()), str):
            yield piece
        if isinstance(piece, UserError):
            raise RunError(str(piece)) from piece
        if isinstance(piece, BaseException):
            raise piece
        self._report = self.report_of() if piece is None else piece


class Texts:
    """The texts of one generator."""

    def __init__(self, generator: Generator | BatchGenerator) -> None:
        self._generator = generator
        self._turns = OneByOne("flashmem-texts")  # of a generator of one text at a time

    @asynccontextmanager
    async def begin(self, tokens: list[int], wanted: Request, client: Client) -> AsyncIterator[Text]:
        """Generate a text after `tokens`: at once in a batch, else when all before it are done. It ends with the body."""
        text, generator = Text(client), self._generator
        end: Callable[[], object]
        if isinstance(generator, BatchGenerator):
            batched = generator.generate(tokens, deliver=text.put, **wanted.options)
            text.report_of, end = lambda: batched.report, batched.close
        else:
            turn = self._turns.begin(partial(self._generate, generator, tokens, wanted, text))
            turn.add_done_callback(text.end)
            end = turn.cancel
        try:
            yield text
        finally:
            text.is_over = True
            end()

    @staticmethod
    def _generate(generator: Generator, tokens: list[int], wanted: Request, text: Text) -> GenerationReport | None:
        """Generate a text, in a thread; returns its report, or that of a part if nobody needs more."""
        pieces: Any = generator.generate(tokens, **wanted.options)
        try:
            for piece in pieces:
                text.put(piece)
                if text.is_over:
                    break
        finally:
            pieces.close()
        return generator.last
