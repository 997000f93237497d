"""Texts in the making: a thread generates them, the event loop gives them to clients, and a client that leaves ends its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress

from flashmem.base.errors import RunError, UserError
from flashmem.runtime.generation.batch import BatchGenerator, Generation
from flashmem.runtime.generation.generated_text import GenerationReport, Piece
from flashmem.tools.server.clients import Client
from flashmem.tools.server.protocol import Request


class Text:
    """A text that is generated for a client."""

    def __init__(self, generator: BatchGenerator, tokens: list[int], wanted: Request, client: Client) -> None:
        """Begin the text after `tokens`. Raises UserError or RunError."""
        self._client = client
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Queue[Piece]()
        self.made: Generation = generator.generate(tokens, deliver=self._put, **wanted.options)

    @property
    def report(self) -> GenerationReport:
        """About the text, once all pieces were given."""
        report = self.made.report
        assert report is not None
        return report

    async def pieces(self) -> AsyncIterator[str]:
        """The pieces as they arrive. Raises ClientLeftError, and what ended the generation."""
        while isinstance(piece := await self._client.wait(self._arrived.get()), str):
            yield piece
        if piece is not None:
            raise piece

    def _put(self, piece: Piece) -> None:
        """Give a piece to the event loop; from any thread."""
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._arrived.put_nowait, piece)


@contextmanager
def begun(generator: BatchGenerator, tokens: list[int], wanted: Request, client: Client) -> Iterator[Text]:
    """A text that is generated, and ends with the body. Raises RunError."""
    try:
        text = Text(generator, tokens, wanted, client)
        try:
            yield text
        finally:
            text.made.close()
    except UserError as error:  # tokens and options were checked before
        raise RunError(str(error)) from error
