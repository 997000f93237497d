"""One generation: its options, the choice of its tokens, its text in pieces, and the report about it."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from flashmem.bundle.language import Language
from flashmem.runtime.generation.candidates import Candidates
from flashmem.runtime.generation.options import TextRequest
from flashmem.runtime.generation.sampling import Sampler
from flashmem.runtime.generation.speculation import Drafts
from flashmem.runtime.generation.stops import Stops
from flashmem.runtime.generation.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationReport:
    """What a generation took.

    `prompt`: tokens of the prompt, of which `reused` were in the cache. `tokens`: generated ones. `first_seconds`: until the
    first token. `token_seconds` and `token_bytes`: time, and weights loaded, for each later one; 0 without any. `drafted`:
    tokens that `runtime.generation.speculation` proposed, of which `accepted` were right. `peak_bytes`: memory that the budget
    counts, in the last run. `ended`: by the model, or at a text of `stop`; not because of `max_new_tokens` or a full cache.
    """

    prompt: int
    reused: int
    tokens: int
    first_seconds: float
    token_seconds: float
    token_bytes: int
    drafted: int
    accepted: int
    peak_bytes: int
    ended: bool


Piece = str | Exception | None
"""A piece of a text, or what ended it before its end, or None at the end."""


class GeneratedText:
    """The text after a prompt, token by token, and what it took.

    Attributes:
        tokens: of the prompt, then those generated; the next run reads the last one.
        prompt: the number of tokens of the prompt.
        reused: how many of these were in the cache.
        drafts: proposes tokens that the next run checks; None without speculation.
        draft: what the run under way checks.
        drafted: tokens of drafts, of which `accepted` were right.
        peak_bytes: memory that the budget counts, in the last run.
        count: tokens generated so far.
        is_over: no further token is needed.
        is_cancelled: it has ended before that.
        ended: by the model, or at a stop text.
        summed_at: see `Sampler`.
    """

    def __init__(
        self,
        language: Language,
        tokenizer: Tokenizer,
        request: TextRequest,
        prompt: Sequence[int],
        put: Callable[[Piece], None],
        drafts: Drafts | None = None,
    ) -> None:
        """`put` gets the pieces."""
        self._language = language
        self._tokenizer = tokenizer
        self._most = request.max_new_tokens
        self._sampler = Sampler(request.sampling)
        self._stops = Stops(request.stop)
        self._text_of = codecs.getincrementaldecoder("utf-8")("replace")
        self._put = put
        self.drafts = drafts
        self.draft = list[int]()
        self.summed_at = self._sampler.summed_at
        self.tokens = list(prompt)
        self.prompt = len(prompt)
        self.reused = self.drafted = self.accepted = self.peak_bytes = self.count = 0
        self.is_over = self.is_cancelled = self.ended = False
        self._first_seconds = self._later_seconds = 0.0
        self._later_bytes = 0
        self.resume()

    def resume(self) -> None:
        """Count time from now on: what was before is not of this text, nor of its last token."""
        self._since = perf_counter()

    def follow(self, candidates: Candidates, nbytes: int) -> None:
        """Choose the next token, after runs that loaded `nbytes` for it; puts the text that can be shown now.

        Raises:
            RunError: the logits are not numbers, or cannot be read.
        """
        token = self._sampler.choose(candidates, self.tokens)
        text = self._shown(token)
        seconds = perf_counter() - self._since
        if self.count <= 1:
            self._first_seconds = seconds
        else:
            self._later_seconds += seconds
            self._later_bytes += nbytes
        if self.is_over:
            text += self._stops.rest(self._text_of.decode(b"", final=True))
        else:
            self.tokens.append(token)
        self.resume()
        if text:
            self._put(text)
        if self.is_over:
            self._put(None)

    def _shown(self, token: int) -> str:
        """The text that can be shown with a chosen token."""
        if token in self._language.ends:
            self.ended = self.is_over = True
            return ""
        self.count += 1
        text = self._stops.passed(self._text_of.decode(self._tokenizer.decode([token])))
        self.ended = self._stops.found
        self.is_over = self.ended or len(self.tokens) == self._language.max_length or self.count == self._most
        return text

    def cancel(self) -> None:
        """Ask for its end; from any thread. Who waits for a piece gets the end."""
        self.is_cancelled = True
        self._put(None)

    def fail(self, error: Exception) -> None:
        """End it with an error."""
        self.is_cancelled = True
        self._put(error)

    def report(self) -> GenerationReport:
        """The report about it so far."""
        later = max(1, self.count - 1)
        return GenerationReport(
            prompt=self.prompt,
            reused=self.reused,
            tokens=self.count,
            first_seconds=self._first_seconds,
            token_seconds=self._later_seconds / later,
            token_bytes=self._later_bytes // later,
            drafted=self.drafted,
            accepted=self.accepted,
            peak_bytes=self.peak_bytes,
            ended=self.ended,
        )
