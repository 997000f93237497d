"""Several requests at a time: each has a row of a language model's batch, and a run reads the weights once for all rows.

Requests join and leave between two runs. A row has a cache of its own, filled to a length of its own. Two programs share the
caches: one reads a token in each row, the other `BATCH_TOKENS` of a prompt. A row that takes no part in a run reads tokens
that mean nothing, at places behind its own, which it overwrites before it sees them. While some requests read their prompts and
others do not, the two programs take turns. So what a row computes does not depend on the others: a request's tokens are those
that it has alone.

A row keeps the prompt of its last request. A prompt that begins in the same way takes that row, and reads only the rest. It has
the same tokens as if it read all: runs begin at the same multiples of `BATCH_TOKENS`, so only those parts are reused that the
same runs have written. Tokens that were generated are not, because they were read one by one.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, Unpack

import numpy as np

from flashmem.base.errors import RunError, UserError
from flashmem.base.interrupts import held_back
from flashmem.base.threads import Thread, call_each, started
from flashmem.bundle.language import BATCH_TOKENS, CANDIDATES, IDS, LOGITS, TEMPERATURE, TOTAL
from flashmem.request.description import initialised_by
from flashmem.request.opening import GeneratorCall, SessionRequest
from flashmem.runtime.generation.candidates import Candidates, rows_of
from flashmem.runtime.generation.generated_text import GeneratedText, GenerationReport
from flashmem.runtime.generation.language_session import language_of, rows_in, shared_prefix
from flashmem.runtime.generation.options import TextOptions, TextRequest
from flashmem.runtime.generation.prompts import Prompt, tokens_of
from flashmem.runtime.generation.tokenizer import Tokenizer
from flashmem.runtime.request.models import bundle_for
from flashmem.runtime.session import Session

Piece = str | Exception | None
"""A piece of a text, or what ended the request before its end, or None at the end."""


class _Request:
    """A request: its text, of whose tokens `read` are in the cache of its row, and what its client gets.

    `deliver` gets what else is in `pieces`.
    """

    def __init__(self, made: GeneratedText, deliver: Callable[[Piece], None] | None = None) -> None:
        self.made, self.read = made, 0
        self.pieces: SimpleQueue[Piece] = SimpleQueue()
        self.put = deliver or self.pieces.put
        self.is_cancelled = False
        self.report: GenerationReport | None = None

    @property
    def unread(self) -> int:
        """How many tokens runs have to read."""
        return len(self.made.tokens) - self.read

    @property
    def reads_prompt(self) -> bool:
        """Whether the next run for it reads several tokens."""
        return self.unread > 1 and len(self.made.tokens) >= BATCH_TOKENS

    def next_tokens(self, count: int) -> tuple[int, list[int]]:
        """The tokens of its next run, and the place of the first; some are read again where fewer are left."""
        start = min(self.read, len(self.made.tokens) - count)
        return start, self.made.tokens[start : start + count]

    def reusable(self, kept: Sequence[int]) -> int:
        """How many of the tokens `kept` in a row it need not read: whole runs of its own, but for the last token."""
        return shared_prefix(self.made.tokens[:-1], kept) // BATCH_TOKENS * BATCH_TOKENS

    def reuse(self, count: int) -> None:
        """Begin with `count` tokens in the cache."""
        self.read = self.made.reused = count

    def left_behind(self) -> list[int]:
        """What it leaves for others: the tokens that runs from a multiple of `BATCH_TOKENS` on have read, and no later one."""
        prompt = self.made.prompt
        rest = prompt % BATCH_TOKENS
        whole = prompt - rest - (BATCH_TOKENS if rest > 1 else 0)  # the last run reads some tokens of the one before again
        return self.made.tokens[: max(0, min(whole, self.read // BATCH_TOKENS * BATCH_TOKENS))]

    def cancel(self) -> None:
        """Ask for its end; from any thread. Who waits for a piece gets the end."""
        self.is_cancelled = True
        self.put(None)

    def follow(self, candidates: Candidates, nbytes: int, peak_bytes: int) -> bool:
        """Choose the next token, after a run that loaded `nbytes`; returns whether the request has ended."""
        made = self.made
        try:
            text = made.follow(candidates, nbytes)
        except RunError as error:
            self.fail(error)
            return True
        if text:
            self.put(text)
        if made.is_over:
            if text := made.rest():
                self.put(text)
            self.report = made.report(peak_bytes)
            self.put(None)
        return made.is_over

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.put(error)


class Generation:
    """The text of one request in pieces, as they are generated. An iterator for one thread at a time.

    `close` ends the request, and so does the last reference to it.
    """

    def __init__(self, request: _Request) -> None:
        self._request, self._is_over = request, False
        weakref.finalize(self, request.cancel).atexit = False

    @property
    def report(self) -> GenerationReport | None:
        """The report, once the request has ended by itself. Its times include those of waiting for a row."""
        return self._request.report

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        """The next piece; waits for it.

        Raises:
            RunError: a run failed, or gave no numbers; or the generator was closed.
        """
        if self._is_over:
            raise StopIteration
        piece = self._request.pieces.get()
        if isinstance(piece, str):
            return piece
        self._is_over = True
        if piece is None:
            raise StopIteration
        raise RunError(str(piece)) from piece

    def close(self) -> None:
        """End the request; its row is free after the run under way."""
        self._is_over = True
        self._request.cancel()


class BatchGenerator:
    """Generates text for several requests at a time. A context manager; any thread may call `generate`.

    A thread of its own makes the runs while there are requests. Those beyond the rows of the batch wait, in the order of their
    arrival.
    """

    @initialised_by(GeneratorCall)
    def __init__(self, call: GeneratorCall) -> None:
        """Open a session of a bundle that was compiled for a `batch`.

        A batch checks no drafts: a run for 8 tokens of each row computes 8 times as much, and rows together use the processor
        already.

        Raises:
            UserError: no bundle of a language model for a batch, or a draft; and the errors of `Session`.
            RunError: the device refuses.
        """
        if call.draft is not None:
            raise UserError("a batch makes no drafts; leave the draft model out, or open a Generator for one request at a time")
        opening = call.given_as(SessionRequest)
        made = bundle_for(call.bundle, opening, build=True)
        self.language, count = language_of(made), rows_in(made)
        if count == 1:
            raise UserError(f"{made.path} answers one request at a time; compile the model with --batch 8, for instance")
        self.tokenizer = Tokenizer(self.language)
        self._session = Session(made, **opening.of_session)
        self._lock = threading.Lock()  # held for all below, but not during runs
        self._waiting: deque[_Request] = deque()
        self._rows: list[_Request | None] = [None] * count
        self._kept: list[list[int]] = [[] for _ in range(count)]  # tokens in the caches of rows without a request
        self._worker: Thread | None = None
        self._is_closed = False
        self._read_prompts = False  # whether the last run did; of the worker alone

    @property
    def rows(self) -> int:
        """The requests that are answered at a time."""
        return len(self._rows)

    def generate(
        self, prompt: Prompt, *, deliver: Callable[[Piece], None] | None = None, **options: Unpack[TextOptions]
    ) -> Generation:
        """Begin to answer a request, and return at once; the arguments are those of `Generator.generate`.

        `deliver`, if it is given, gets the pieces, in other threads; it must not wait, nor raise. The result has none then.

        Raises:
            UserError: as `Generator.generate`.
            RunError: the generator is closed, or the system has no more threads.
        """
        wanted = TextRequest.resolved(self.language.sampling, **options)
        tokens = self.tokens_of(prompt, wanted.template_arguments)
        request = _Request(GeneratedText(self.language, self.tokenizer, wanted, tokens), deliver)
        with held_back(), self._lock:
            if self._is_closed:
                raise RunError("the generator is closed; open a new one")
            if self._worker is None:
                self._worker = started(self._work, "flashmem-batch")
            self._waiting.append(request)
        return Generation(request)

    def tokens_of(self, prompt: Prompt, template_arguments: Mapping[str, Any] | None = None) -> list[int]:
        """The tokens of a prompt, as `generate` reads them. Raises UserError."""
        return tokens_of(prompt, self.language, self.tokenizer, template_arguments)

    def close(self) -> None:
        """End all requests after the run under way, and close the session."""
        with self._lock:
            self._is_closed = True
            worker = self._worker
        call_each(None if worker is None else worker.join, self._session.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _work(self) -> None:
        """Make runs until no request is left."""
        while True:
            with self._lock:
                active = self._next_rows()
                if not any(active):
                    self._worker = None
                    return
            try:
                ended = self._run(active)
            except Exception as error:
                with self._lock:
                    self._end_all(error)
                continue
            with self._lock:
                for number, request in enumerate(active):
                    if request in ended:
                        self._free(number)

    def _next_rows(self) -> list[_Request | None]:
        """The rows of the next run: without requests that were cancelled, and with those that waited."""
        if self._is_closed:
            self._end_all(RunError("the generator was closed"))
        for number, request in enumerate(self._rows):
            if request is not None and request.is_cancelled:
                self._free(number)
        free = [number for number, request in enumerate(self._rows) if request is None]
        self._waiting = deque(request for request in self._waiting if not request.is_cancelled)
        while free and self._waiting:
            request = self._waiting.popleft()
            shared = {number: request.reusable(self._kept[number]) for number in free}
            number = max(free, key=lambda each: (shared[each], -len(self._kept[each])))
            request.reuse(shared[number])
            self._rows[number], self._kept[number] = request, []
            free.remove(number)
        return list(self._rows)

    def _free(self, number: int) -> None:
        """Free a row, whose request is over."""
        request = self._rows[number]
        assert request is not None
        self._rows[number], self._kept[number] = None, request.left_behind()

    def _end_all(self, error: Exception) -> None:
        for request in (*self._rows, *self._waiting):
            if request is not None:
                request.fail(error)
        self._rows = [None] * len(self._rows)
        self._kept = [[] for _ in self._rows]
        self._waiting.clear()

    def _run(self, rows: Sequence[_Request | None]) -> list[_Request]:
        """One run for some of the requests in `rows`; returns those that have ended.

        Raises:
            RunError: the run failed; the session is closed.
        """
        reading = [request for request in rows if request is not None and request.reads_prompt]
        others = [request for request in rows if request is not None and not request.reads_prompt]
        self._read_prompts = bool(reading) and not (others and self._read_prompts)
        running, count = (reading, BATCH_TOKENS) if self._read_prompts else (others, 1)
        ids, totals = np.zeros((len(rows), count), np.int64), np.full(len(rows), count, np.int32)
        temperatures = np.ones(len(rows), np.float32)
        for number, request in enumerate(rows):
            if request is None:
                totals[number] = len(self._kept[number]) + count
                continue
            start = request.read
            if request in running:
                start, ids[number] = request.next_tokens(count)
                request.read = start + count
            totals[number] = start + count
            temperatures[number] = request.made.summed_at
        [output] = self._session.run([CANDIDATES], {IDS: ids, TOTAL: totals, TEMPERATURE: temperatures})
        run = self._session.last_run
        assert run is not None
        nbytes, peak = run.loaded_bytes, run.memory.peak_bytes
        found = rows_of(output[:, 0], temperatures.tolist(), cache(lambda: self._session.outputs(LOGITS)[LOGITS][:, 0]))
        return [
            request
            for request, candidates in zip(rows, found, strict=True)
            if request is not None and request in running and not request.unread and request.follow(candidates, nbytes, peak)
        ]
