"""Text generation: a session whose states are the cache of keys and values, one token after the other."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.bundle.bundle import Bundle
from flashmem.bundle.language import CHECKED_TOKENS, IDS, TOTAL
from flashmem.program.program import Program
from flashmem.runtime.generation.conversation import Message, model_key, read_conversation, write_conversation
from flashmem.runtime.generation.sampling import Sampler, Sampling
from flashmem.runtime.generation.speculation import Lookup, Payoff
from flashmem.runtime.generation.tokenizer import Tokenizer
from flashmem.runtime.session import Session

Array = NDArray[Any]

_FEW = 4
"""So many last tokens of a prompt are read one by one, and more in a run that reads others again."""


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


class Generator:
    """Generates text with a bundle that was compiled from a language model. A context manager; not for several threads at once.

    The cache keeps what was read and generated. Of a prompt that begins in the same way, only the rest is read.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        device: str = "auto",
        budget: int | str | None = None,
        host_budget: int | str | None = None,
        mode: TransferMode | Literal["auto"] = "auto",
    ) -> None:
        """Open a session; the arguments are those of `Session`.

        Raises:
            UserError: no bundle, or one of another model; and the errors of `Session`.
            RunError: the device refuses.
        """
        opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
        language = opened.language()
        if language is None:
            raise UserError(f"{opened.path} has no tokenizer; compile a language model from a .gguf file")
        self.language = language
        self.tokenizer = Tokenizer(language)
        self.last: GenerationReport | None = None  # of the last generation that ended
        self._cached: list[int] = []  # the tokens in the cache
        self._lengths = sorted((_words(each.program) for each in opened.variants), reverse=True)
        self._slice_bytes = {part.name: part.file_bytes for each in opened.variants for part in each.program.slices}
        self._opened = opened
        self._session = Session(opened, device=device, budget=budget, host_budget=host_budget, mode=mode)

    def generate(
        self,
        prompt: str | Sequence[Message] | Sequence[int],
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        repetition_penalty: float = 1.0,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        speculate: bool = True,
    ) -> Iterator[str]:
        """Continue a text, or answer a conversation; yields the new text in pieces, as it is generated.

        It ends at the model's own end, at one of the texts `stop` (which is not yielded), after `max_new_tokens`, or when the
        cache is full. Afterwards `last` has the report.

        Args:
            prompt: a text to continue; messages, of which the last is the user's; or tokens.
            max_new_tokens: the most tokens to generate.
            temperature, top_k, top_p, repetition_penalty, seed: see `Sampling`. The default takes the likeliest token.
            stop: texts that end the generation.
            speculate: check drafts of several tokens in one run where the text repeats itself and that saves time.

        Raises:
            UserError: a number out of range; a prompt without tokens, with unknown ones, or longer than the cache; messages
                that the chat template does not take.
            RunError: a run fails, or gives no numbers.
        """
        tokens = self.tokens_of(prompt)
        if len(tokens) > self.language.max_length:
            raise UserError(
                f"the prompt has {len(tokens)} tokens, and the cache holds {self.language.max_length}; shorten the prompt, or "
                "compile the model with a larger --max-length"
            )
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens {max_new_tokens} is not possible; give a number that is 1 or more")
        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
        return self._generated(tokens, max_new_tokens, Sampler(sampling), _Stops(stops), speculate)

    def tokens_of(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        """The tokens of a prompt, as `generate` reads them. Raises UserError."""
        try:
            tokens = self._tokens_of(prompt)
        except ValueError as error:  # the vocabulary lacks a byte
            raise UserError(str(error)) from error
        if not tokens:
            raise UserError("the prompt is empty; give at least one word")
        return tokens

    def save(self, path: str | Path, messages: Sequence[Message] = ()) -> None:
        """Save the cache, and the `messages` of its conversation, to a file (.npz), whole or not at all.

        Raises:
            OSError: the file cannot be written.
            RunError: the device fails.
        """
        write_conversation(Path(path), model_key(self._opened), self._cached, messages, self._session)

    def restore(self, path: str | Path) -> list[Message]:
        """Continue with a saved cache; returns the messages that were saved with it.

        Raises:
            UserError: the file is damaged, or of another model.
            RunError: the device fails.
        """
        self._cached = []
        model, length = model_key(self._opened), self.language.max_length
        self._cached, messages = read_conversation(Path(path), model, length, self._session)
        return messages

    def _tokens_of(self, prompt: str | Sequence[Message] | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            begin = [] if self.language.begin is None else [self.language.begin]
            return begin + self.tokenizer.encode(prompt)
        messages = [each for each in prompt if isinstance(each, Mapping)]
        if messages and len(messages) == len(prompt):
            return self._conversation(messages)
        tokens = [int(each) for each in prompt if isinstance(each, int | np.integer)]
        if len(tokens) != len(prompt) or not all(0 <= each < len(self.language.tokens) for each in tokens):
            raise UserError(f"the prompt is neither a text, nor messages, nor tokens from 0 to {len(self.language.tokens) - 1}")
        return tokens

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation. Control tokens are recognised in the template, not in the messages."""
        chat = self.language.chat
        if chat is None:
            raise UserError("the model has no chat template that flashmem understands; give a text to continue")
        parts: list[tuple[str, bool]] = []
        before = ""
        for message in messages:
            role, content = message.get("role", ""), message.get("content")
            piece = chat.get(f"{before} {role}".strip())
            if piece is None and role == "system" and not before:
                raise UserError("the model's chat template has no message of the system; put it into the user's first one")
            if piece is None or not isinstance(content, str):
                raise UserError(
                    "a conversation is an optional message of the system, then messages of user and assistant in turn, each "
                    f"with a role and a content; one has the role {role!r} after {before or 'nothing'!r}"
                )
            parts += [(piece, True), (content, False)]
            before = role
        if before != "user":
            raise UserError("the last message of a conversation must be the user's")
        tokens = self.tokenizer.encode_parts([*parts, (chat["user assistant"], True)])
        begin = self.language.begin
        return tokens if begin is None or tokens[:1] == [begin] else [begin, *tokens]

    def _generated(self, tokens: list[int], most: int, sampler: Sampler, stops: _Stops, speculate: bool) -> Iterator[str]:
        begun, count, seconds = perf_counter(), 0, 0.0
        first, reused, decoder = 0.0, self._reusable(tokens), codecs.getincrementaldecoder("utf-8")("replace")
        room = self.language.max_length if speculate and CHECKED_TOKENS in self._lengths else 0
        ended, steps = False, _Steps(self._run, self._loaded, self._cached, room)
        try:
            logits = self._read(tokens, reused)
            first = perf_counter() - begun
            while count < most:
                since = perf_counter()
                token = sampler.choose(logits, self._cached)
                if token in self.language.ends:
                    ended = True
                    break
                count += 1
                seconds += perf_counter() - since
                if text := stops.passed(decoder.decode(self.tokenizer.decode([token]))):
                    yield text
                if stops.found or len(self._cached) == self.language.max_length or count == most:
                    break
                since = perf_counter()
                logits = steps.after(token)
                seconds += perf_counter() - since
            if text := stops.rest(decoder.decode(b"", final=True)):
                yield text
        finally:
            steps.finish()
            run, later = self._session.last_run, max(1, count - 1)
            self.last = GenerationReport(
                prompt=len(tokens),
                reused=reused,
                tokens=count,
                first_seconds=first,
                token_seconds=seconds / later if count > 1 else 0.0,
                token_bytes=steps.nbytes // later,
                drafted=steps.drafted,
                accepted=steps.accepted,
                peak_bytes=run.memory.peak_bytes if run is not None else 0,
                ended=ended or stops.found,
            )

    def _reusable(self, tokens: list[int]) -> int:
        """How many tokens of a prompt are in the cache; the last one is read anyway, for its logits."""
        pairs = zip(tokens[:-1], self._cached, strict=False)
        return next((at for at, (new, old) in enumerate(pairs) if new != old), min(len(tokens) - 1, len(self._cached)))

    def _read(self, tokens: list[int], at: int) -> Array:
        """Read a prompt from token `at` on, in runs as long as the variants permit; returns the logits of the last token.

        The last run of several tokens may begin earlier, and read some again.
        """
        while True:
            rest = len(tokens) - at
            length = next(each for each in self._lengths if each <= rest or (each <= len(tokens) and rest > _FEW))
            start = min(at, len(tokens) - length)
            logits = self._run(tokens[start : start + length], start)
            at = start + length
            if at == len(tokens):
                last: Array = logits[-1]
                return last

    def _run(self, tokens: list[int], start: int) -> Array:
        """Run the model on tokens at positions from `start` on; returns the logits of the last ones [rows, vocabulary]."""
        del self._cached[start:]
        total = np.array(start + len(tokens), np.int32)
        [logits] = self._session.run(None, {IDS: np.array([tokens], np.int64), TOTAL: total})
        self._cached += tokens
        rows: Array = logits[0]
        return rows

    def _loaded(self) -> int:
        """Bytes of weights that the last run loaded."""
        run = self._session.last_run
        names = {load.name for load in run.loads} if run is not None else set[str]()
        return sum(self._slice_bytes.get(name, 0) for name in names)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the session."""
        self._session.close()


class _Steps:
    """The runs after each token of a generation, some with drafts. `nbytes`: weights that they loaded."""

    def __init__(self, run: Callable[[list[int], int], Array], loaded: Callable[[], int], cached: list[int], room: int) -> None:
        """`run` and `loaded` are the generator's; `cached` is its list of tokens. Drafts end at `room` tokens."""
        self._run, self._loaded, self._cached, self._room = run, loaded, cached, room
        self._lookup, self._payoff = Lookup(), Payoff()
        self._known = 0  # tokens that `_lookup` has
        self._waiting: list[tuple[int, Array]] = []  # drafted tokens that a run has read, and the logits after each
        self._check: tuple[float, int] | None = None  # seconds of that run, and tokens that it has given
        self.nbytes = self.drafted = self.accepted = 0

    def after(self, token: int) -> Array:
        """The logits after a chosen token [vocabulary]."""
        if self._waiting and self._waiting[0][0] == token:
            assert self._check is not None
            self._check = self._check[0], self._check[1] + 1
            self.accepted += 1
            self._cached.append(token)
            return self._waiting.pop(0)[1]
        self.finish()
        draft = self._draft(token)
        since, start = perf_counter(), len(self._cached)
        rows = self._run([token, *draft], start)
        seconds = perf_counter() - since
        self.nbytes += self._loaded()
        if not draft:
            self._payoff.single(seconds)
            return rows[-1]  # type: ignore[no-any-return]
        del self._cached[start + 1 :]
        self._check, self.drafted = (seconds, 1), self.drafted + len(draft)
        self._waiting = list(zip(draft, rows[1:], strict=False))
        return rows[0]  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Drop what is left of a draft, and learn from it."""
        if self._check is not None:
            self._payoff.checked(*self._check)
        self._check, self._waiting = None, []

    def _draft(self, token: int) -> list[int]:
        """Tokens that may follow, as many as a run checks; none if that is not worth it."""
        if len(self._cached) + CHECKED_TOKENS > self._room:
            return []
        self._lookup.add([*self._cached[self._known :], token])
        self._known = len(self._cached) + 1
        if not self._payoff.allows():
            return []
        draft = self._lookup.draft(CHECKED_TOKENS - 1)
        return draft + draft[-1:] * (CHECKED_TOKENS - 1 - len(draft))  # a run reads as many in any case


class _Stops:
    """Holds back text that may become one of the stop texts."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops, self._held, self.found = [stop for stop in stops if stop], "", False

    def passed(self, text: str) -> str:
        """The text that can be shown after `text` is there too."""
        held = self._held + text
        ends = [at for stop in self._stops if (at := held.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return held[: min(ends)]
        kept = max((size for stop in self._stops for size in range(1, len(stop)) if held.endswith(stop[:size])), default=0)
        self._held = held[len(held) - kept :]
        return held[: len(held) - kept]

    def rest(self, text: str) -> str:
        """What is left at the end."""
        return "" if self.found else self._held + text


def _words(program: Program) -> int:
    """The tokens that a run of `program` reads."""
    [ids] = [port for port in program.inputs if port.name == IDS]
    return int(ids.shape[1])
