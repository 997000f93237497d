"""Several requests at a time: each has a row of a language model's batch, and a run reads the weights once for all rows.

Requests join and leave between two runs. A row has a cache of its own, filled to a length of its own. Two programs share the
caches: one reads a token in each row, the other `BATCH_TOKENS` of a prompt. A row that takes no part in a run reads tokens
that mean nothing, at places behind its own, which it overwrites before it sees them. While some requests read their prompts and
others do not, the two programs take turns. So what a row computes does not depend on the others: a request's tokens are those
that it has alone.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Literal, Self, Unpack

import numpy as np

from flashmem.base.errors import RunError, UserError
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import BATCH_TOKENS, CANDIDATES, IDS, LOGITS, TEMPERATURE, TOTAL
from flashmem.runtime.generation.candidates import Candidates, rows_of
from flashmem.runtime.generation.generated_text import GeneratedText, GenerationReport
from flashmem.runtime.generation.language_session import language_of, rows_in
from flashmem.runtime.generation.prompts import Prompt, tokens_of
from flashmem.runtime.generation.sampling import Sampling
from flashmem.runtime.generation.tokenizer import Tokenizer
from flashmem.runtime.request.models import ModelOptions, bundle_for
from flashmem.runtime.session import Session


class _Request:
    """A request: its tokens, of which `read` are in the cache of its row, and what its client gets."""

    def __init__(self, tokens: Sequence[int], made: GeneratedText) -> None:
        self.tokens, self.made, self.prompt, self.read = list(tokens), made, len(tokens), 0
        self.pieces: SimpleQueue[str | Exception | None] = SimpleQueue()  # None at the end
        self.is_cancelled = False
        self.report: GenerationReport | None = None
        self._begun, self._first, self._last, self._nbytes = perf_counter(), 0.0, 0.0, 0

    @property
    def reads_prompt(self) -> bool:
        """Whether the next run for it reads several tokens."""
        return len(self.tokens) - self.read > 1 and len(self.tokens) >= BATCH_TOKENS

    def next_tokens(self, count: int) -> tuple[int, list[int]]:
        """The tokens of its next run, and the place of the first; some are read again where fewer are left."""
        start = min(self.read, len(self.tokens) - count)
        return start, self.tokens[start : start + count]

    def cancel(self) -> None:
        """Ask for its end; from any thread. Who waits for a piece gets the end."""
        self.is_cancelled = True
        self.pieces.put(None)

    def follow(self, candidates: Candidates, nbytes: int, peak_bytes: int) -> bool:
        """Choose the next token, after a run that loaded `nbytes`; returns whether the request has ended."""
        try:
            token, text = self.made.choose(candidates, self.tokens)
        except RunError as error:
            self.fail(error)
            return True
        now = perf_counter()
        if self.made.count <= 1:
            self._first = now
        else:
            self._nbytes += nbytes
        self._last = now
        if text:
            self.pieces.put(text)
        if self.made.is_over:
            self._end(peak_bytes)
            return True
        self.tokens.append(token)
        return False

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.pieces.put(error)

    def _end(self, peak_bytes: int) -> None:
        if text := self.made.rest():
            self.pieces.put(text)
        count, later = self.made.count, max(1, self.made.count - 1)
        self.report = GenerationReport(
            prompt=self.prompt,
            reused=0,
            tokens=count,
            first_seconds=self._first - self._begun,
            token_seconds=(self._last - self._first) / later if count > 1 else 0.0,
            token_bytes=self._nbytes // later,
            drafted=0,
            accepted=0,
            peak_bytes=peak_bytes,
            ended=self.made.ended,
        )
        self.pieces.put(None)


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

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        device: str = "auto",
        budget: int | str | None = None,
        host_budget: int | str | None = None,
        process_memory: int | str | None = None,
        mode: TransferMode | Literal["auto"] = "auto",
        **options: Unpack[ModelOptions],
    ) -> None:
        """Open a session; the arguments are those of `Generator`, without a draft model.

        Args:
            bundle: a bundle that was compiled for a `batch`; or the model and `batch=` among the options.
            device, budget, host_budget, process_memory, mode, options: see `Generator`.

        Raises:
            UserError: no bundle of a language model for a batch; and the errors of `Session`.
            RunError: the device refuses.
        """
        made = bundle_for(bundle, device=device, mode=mode, strategy="auto", budget=budget, build=True, options=options)
        self.language, count = language_of(made), rows_in(made)
        if count == 1:
            raise UserError(f"{made.path} answers one request at a time; compile the model with --batch 8, for instance")
        self.tokenizer = Tokenizer(self.language)
        self._session = Session(
            made, device=device, budget=budget, host_budget=host_budget, process_memory=process_memory, mode=mode
        )
        self._lock = threading.Lock()  # held for all below, but not during runs
        self._waiting: deque[_Request] = deque()
        self._rows: list[_Request | None] = [None] * count
        self._worker: threading.Thread | None = None
        self._is_closed = False
        self._read_prompts = False  # whether the last run did; of the worker alone

    @property
    def rows(self) -> int:
        """The requests that are answered at a time."""
        return len(self._rows)

    def generate(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
    ) -> Generation:
        """Begin to answer a request, and return at once; the arguments are those of `Generator.generate`.

        Raises:
            UserError: as `Generator.generate`.
            RunError: the generator is closed.
        """
        tokens = self.tokens_of(prompt)
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        made = GeneratedText(self.language, self.tokenizer, tokens, max_new_tokens=max_new_tokens, sampling=sampling, stop=stop)
        request = _Request(tokens, made)
        with self._lock:
            if self._is_closed:
                raise RunError("the generator is closed; open a new one")
            self._waiting.append(request)
            if self._worker is None:
                self._worker = threading.Thread(target=self._work, name="flashmem-batch", daemon=True)
                self._worker.start()
        return Generation(request)

    def tokens_of(self, prompt: Prompt) -> list[int]:
        """The tokens of a prompt, as `generate` reads them. Raises UserError."""
        return tokens_of(prompt, self.language, self.tokenizer)

    def close(self) -> None:
        """End all requests after the run under way, and close the session."""
        with self._lock:
            self._is_closed = True
            worker = self._worker
        if worker is not None:
            worker.join()
        self._session.close()

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
                self._rows = [None if request in ended else request for request in active]

    def _next_rows(self) -> list[_Request | None]:
        """The rows of the next run: without requests that were cancelled, and with those that waited."""
        if self._is_closed:
            self._end_all(RunError("the generator was closed"))
        for number, request in enumerate(self._rows):
            if request is not None and request.is_cancelled:
                self._rows[number] = request = None
            while request is None and self._waiting:
                candidate = self._waiting.popleft()
                if not candidate.is_cancelled:
                    self._rows[number] = request = candidate
        return list(self._rows)

    def _end_all(self, error: Exception) -> None:
        for request in (*self._rows, *self._waiting):
            if request is not None:
                request.fail(error)
        self._rows = [None] * len(self._rows)
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
        nbytes, peak = sum(load.nbytes for load in run.loads), run.memory.peak_bytes
        found = rows_of(output[:, 0], temperatures.tolist(), cache(lambda: self._session.outputs(LOGITS)[LOGITS][:, 0]))
        return [
            request
            for request, candidates in zip(rows, found, strict=True)
            if request is not None
            and request in running
            and request.read == len(request.tokens)
            and request.follow(candidates, nbytes, peak)
        ]
