"""Several requests at a time: each has a row of a language model's batch, and a run reads the weights once for all rows.

Requests join and leave between two runs (`flashmem.runtime.generation.scheduler`). A model of one row answers them in turn.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Unpack

from flashmem.base.errors import RunError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, call_each, started
from flashmem.request.description import initialised_by
from flashmem.request.opening import GeneratorCall
from flashmem.runtime.generation.generated_text import GeneratedText, GenerationReport, Piece
from flashmem.runtime.generation.options import TextOptions
from flashmem.runtime.generation.prompts import Prompt
from flashmem.runtime.generation.text_model import TextModel


class Generation:
    """The text of one request in pieces, as they are generated. An iterator for one thread at a time.

    `close` ends the request, and so does the last reference to it.
    """

    def __init__(self, text: GeneratedText, pieces: SimpleQueue[Piece]) -> None:
        self._text = text
        self._pieces = pieces
        self._is_over = False
        weakref.finalize(self, text.cancel).atexit = False

    @property
    def report(self) -> GenerationReport | None:
        """The report, once the request has ended by itself. Its times include those of waiting for a row."""
        return self._text.report() if self._text.is_over else None

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece; waits for it.

        Raises:
            RunError: a run failed, or gave no numbers; or the generator was closed.
        """
        if self._is_over:
            raise StopIteration
        piece = self._pieces.get()
        if isinstance(piece, str):
            return piece
        self._is_over = True
        if piece is None:
            raise StopIteration
        raise RunError(str(piece)) from piece

    def close(self) -> None:
        """End the request; its row is free after the run under way."""
        self._is_over = True
        self._text.cancel()


class BatchGenerator(TextModel):
    """Generates text for several requests at a time. A context manager; any thread may call `generate`.

    A thread of its own makes the runs while there are requests. Those beyond the rows of the batch wait, in the order of their
    arrival. A batch checks no drafts: a run for 8 tokens of each row computes 8 times as much, and rows together use the
    processor already.
    """

    @initialised_by(GeneratorCall)
    def __init__(self, call: GeneratorCall) -> None:
        """Open a session of a bundle, for as many requests at a time as the `batch` for which it was compiled.

        Raises:
            UserError: no bundle of a language model, or a draft for a batch; and the errors of `Session`.
            RunError: the device refuses.
        """
        super().__init__(call)
        self._lock = threading.Lock()  # held for all below and the scheduler, but not during runs
        self._worker: Thread | None = None
        self._is_closed = False

    def generate(
        self,
        prompt: Prompt,
        *,
        deliver: Callable[[Piece], None] | None = None,
        speculate: bool = True,
        **options: Unpack[TextOptions],
    ) -> Generation:
        """Begin to answer a request, and return at once; the arguments are those of `Generator.generate`.

        `deliver`, if it is given, gets the pieces, in other threads; it must not wait, nor raise. The result has none then.

        Raises:
            UserError: as `Generator.generate`.
            RunError: the generator is closed, or the system has no more threads.
        """
        pieces = SimpleQueue[Piece]()
        text = self._text(prompt, deliver or pieces.put, speculate, **options)
        with held_back(), self._lock:
            if self._is_closed:
                raise RunError("the generator is closed; open a new one")
            if self._worker is None:
                self._worker = started(self._work, "flashmem-batch")
            self._scheduler.add(text)
        return Generation(text, pieces)

    def close(self) -> None:
        """End all requests after the run under way, and close the session."""
        with self._lock:
            self._is_closed = True
            worker = self._worker
        call_each(None if worker is None else worker.join, super().close)

    def _work(self) -> None:
        """Make runs until no request is left."""
        while True:
            with self._lock:
                if self._is_closed:
                    self._scheduler.end_all(RunError("the generator was closed"))
                if not self._scheduler.admit():
                    self._worker = None
                    return
            try:
                self._scheduler.step()
            except Exception as error:
                with self._lock:
                    self._scheduler.end_all(error)
