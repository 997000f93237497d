"""Text generation: a session whose states are the cache of keys and values, one token after the other."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Literal, Self, Unpack

import numpy as np

from flashmem.base.errors import UserError
from flashmem.base.types import TransferMode
from flashmem.base.units import parse_size
from flashmem.bundle.bundle import Bundle
from flashmem.runtime.generation.conversation import Message, model_key, read_conversation, write_conversation
from flashmem.runtime.generation.draft_model import DraftModel, check_same_tokens, needed_bytes
from flashmem.runtime.generation.language_session import LanguageSession
from flashmem.runtime.generation.sampling import Sampler, Sampling
from flashmem.runtime.generation.speculation import Drafter, Lookup
from flashmem.runtime.generation.steps import Steps
from flashmem.runtime.generation.stops import Stops
from flashmem.runtime.generation.tokenizer import Tokenizer
from flashmem.runtime.request.models import ModelOptions


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
    """Generates text with a language model. A context manager; not for several threads at once.

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
        draft: Bundle | str | Path | None = None,
        **options: Unpack[ModelOptions],
    ) -> None:
        """Open a session; the other arguments are those of `Session`.

        Args:
            bundle: a bundle of a language model; or the model, which is compiled through the cache, with these `options` of
                `flashmem.compile` (`max_length` for instance).
            device, host_budget, mode: see `Session`.
            budget: most bytes to hold, with those of `draft`.
            draft: a bundle of a small model with the same tokens, whose drafts the model checks. It stays in memory.

        Raises:
            UserError: no bundle, or one of another model; other tokens; and the errors of `Session`.
            RunError: the device refuses.
        """
        self._draft, self._draft_bytes = None, 0
        with ExitStack() as opened:
            if draft is not None:
                draft = draft if isinstance(draft, Bundle) else Bundle.open(draft)
                self._draft_bytes = needed_bytes(draft, device)
                self._draft = opened.enter_context(LanguageSession(draft, device=device, budget=self._draft_bytes))
                budget = None if budget is None else max(0, parse_size(budget, what="budget") - self._draft_bytes)
            self._model = opened.enter_context(
                LanguageSession(bundle, device=device, budget=budget, host_budget=host_budget, mode=mode, **options)
            )
            if self._draft is not None:
                check_same_tokens(self._model.language, self._draft.language)
            self._opened = opened.pop_all()
        self.language = self._model.language
        self.tokenizer = Tokenizer(self.language)
        self.last: GenerationReport | None = None  # of the last generation that ended

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
        return self._generated(tokens, max_new_tokens, Sampler(sampling), Stops(stops), speculate)

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
        write_conversation(Path(path), model_key(self._model.bundle), self._cached, messages, self._model.session)

    def restore(self, path: str | Path) -> list[Message]:
        """Continue with a saved cache; returns the messages that were saved with it.

        Raises:
            UserError: the file is damaged, or of another model.
            RunError: the device fails.
        """
        model, length = self._model, self.language.max_length
        model.cached = []
        model.cached, messages = read_conversation(Path(path), model_key(model.bundle), length, model.session)
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

    def _generated(self, tokens: list[int], most: int, sampler: Sampler, stops: Stops, speculate: bool) -> Iterator[str]:
        begun, count, seconds = perf_counter(), 0, 0.0
        first, reused, text_of = 0.0, self._model.reusable(tokens), codecs.getincrementaldecoder("utf-8")("replace")
        drafters: list[Drafter] = [Lookup(), *([DraftModel(self._draft)] if self._draft is not None else [])]
        ended, steps = False, Steps(self._model, drafters if speculate else [])
        self._model.temperature = sampler.summed_at
        try:
            candidates = self._model.read(tokens, reused)
            first = perf_counter() - begun
            while count < most:
                since = perf_counter()
                token = sampler.choose(candidates, self._cached)
                if token in self.language.ends:
                    ended = True
                    break
                count += 1
                seconds += perf_counter() - since
                if text := stops.passed(text_of.decode(self.tokenizer.decode([token]))):
                    yield text
                if stops.found or len(self._cached) == self.language.max_length or count == most:
                    break
                since = perf_counter()
                candidates = steps.after(token)
                seconds += perf_counter() - since
            if text := stops.rest(text_of.decode(b"", final=True)):
                yield text
        finally:
            steps.finish()
            run, later = self._model.session.last_run, max(1, count - 1)
            self.last = GenerationReport(
                prompt=len(tokens),
                reused=reused,
                tokens=count,
                first_seconds=first,
                token_seconds=seconds / later if count > 1 else 0.0,
                token_bytes=steps.nbytes // later,
                drafted=steps.drafted,
                accepted=steps.accepted,
                peak_bytes=(run.memory.peak_bytes if run is not None else 0) + self._draft_bytes,
                ended=ended or stops.found,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the session, and that of the draft model."""
        self._opened.close()

    @property
    def _cached(self) -> list[int]:
        return self._model.cached
